-- Takes note that a command was obeyed. KEYS: its record.
if redis.call('HGET', KEYS[1], 'state') == 'taken' then
    redis.call('HSET', KEYS[1], 'state', 'applied')
end
