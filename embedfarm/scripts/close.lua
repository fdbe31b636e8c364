-- Say that all chunks are in. What was paused or ended meanwhile stays so.
-- KEYS: meta   ARGV: chunk count
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'gone' end
redis.call('HSET', KEYS[1], 'chunk_count', ARGV[1])
if state ~= 'open' then return state end
redis.call('HSET', KEYS[1], 'state', 'closed')
return 'closed'
