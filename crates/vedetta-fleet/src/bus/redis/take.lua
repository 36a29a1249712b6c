-- Hands out what waits. KEYS: what waits for the target.
local prefix = ARGV[1]
local taken = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    local key = prefix .. 'command:' .. id
    local value, left = redis.call('GET', key), redis.call('PTTL', key)
    redis.call('DEL', key)
    if value and left > 0 then
        local record = prefix .. 'record:' .. id
        -- If the clock was set back since it was put, more seems to be left than there ever was.
        local times = redis.call('HMGET', record, 'created', 'expires')
        if times[1] and times[2] then
            left = math.min(left, times[2] - times[1])
            redis.call('HSET', record, 'state', 'taken')
        end
        table.insert(taken, { id, value, left })
    end
end
redis.call('DEL', KEYS[1])
return taken
