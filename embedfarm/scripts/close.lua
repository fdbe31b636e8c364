#!lua flags=allow-oom
-- Say that all chunks are in. What was paused or ended meanwhile stays so.
-- KEYS: meta   ARGV: chunk count
if string.find(ARGV[1], '%D') then return redis.error_reply('ERR not a number: ' .. ARGV[1]) end
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return 'gone' end
redis.call('HSET', KEYS[1], 'chunk_count', ARGV[1])
if state ~= 'open' then return state end
redis.call('HSET', KEYS[1], 'state', 'closed')
return 'closed'
