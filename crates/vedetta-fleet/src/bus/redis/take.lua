-- Hands out what waits. KEYS: what waits for the target.
local prefix = ARGV[1]
local taken = {}
for _, id in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
    local key = prefix .. 'command:' .. id
    local value, left = redis.call('GET', key), redis.call('PTTL', key)
    redis.call('DEL', key)
    if value and left > 0 then
        redis.call('HSET', prefix .. 'record:' .. id, 'state', 'taken')
        table.insert(taken, { id, value, left })
    end
end
redis.call('DEL', KEYS[1])
return taken
