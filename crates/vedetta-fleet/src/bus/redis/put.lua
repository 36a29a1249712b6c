-- Has a command wait. KEYS: what waits for the target.
local prefix, id, target, value = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl, kept = tonumber(ARGV[5]), tonumber(ARGV[6])
local replaces, yields_to, most, channel = ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function is_one_of(words, word)
    return string.find(',' .. words .. ',', ',' .. word .. ',', 1, true) ~= nil
end

local state, count, replaced = 'requested', 0, {}
for _, old in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    local waits = redis.call('GET', prefix .. 'command:' .. old)
    if waits then
        local word = string.match(waits, '^%S+')
        if is_one_of(yields_to, word) then
            state = 'replaced'
        elseif is_one_of(replaces, word) then
            table.insert(replaced, old)
        else
            count = count + 1
        end
    else
        redis.call('LREM', KEYS[1], 0, old)
    end
end
if state == 'requested' and count >= most then
    return redis.error_reply('VEDETTAFULL too many commands wait')
end
local record = prefix .. 'record:' .. id
redis.call('HSET', record, 'target', target, 'value', value, 'state', state,
    'created', string.format('%.0f', now), 'expires', string.format('%.0f', now + ttl))
redis.call('PEXPIRE', record, ttl + kept)
if state == 'requested' then
    for _, old in ipairs(replaced) do
        redis.call('DEL', prefix .. 'command:' .. old)
        redis.call('LREM', KEYS[1], 0, old)
        redis.call('HSET', prefix .. 'record:' .. old, 'state', 'replaced')
    end
    -- At the time that its record says, by the same clock; Redis takes a key away when its time is past.
    redis.call('SET', prefix .. 'command:' .. id, value, 'PXAT', string.format('%.0f', now + ttl - 1))
    redis.call('RPUSH', KEYS[1], id)
    if redis.call('PTTL', KEYS[1]) < ttl then
        redis.call('PEXPIRE', KEYS[1], ttl)
    end
    redis.call('PUBLISH', channel, target)
end
return { state, string.format('%.0f', now), string.format('%.0f', now + ttl) }
