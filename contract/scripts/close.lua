#!lua flags=allow-oom
-- Say that all chunks are in; 'gap' if they are not, since the server restarted and lost the last.
-- What was paused or ended meanwhile stays so.
-- KEYS: meta   ARGV: chunk count, owner or ""
if string.find(ARGV[1], '%D') then return redis.error_reply('ERR not a number: ' .. ARGV[1]) end
local state, owner = unpack(redis.call('HMGET', KEYS[1], 'state', 'owner'))
if not state or (ARGV[2] and ARGV[2] ~= '' and ARGV[2] ~= owner) then return 'gone' end
if (state == 'open' or state == 'paused')
  and tonumber(redis.call('HGET', KEYS[1], 'pushed_upto')) < tonumber(ARGV[1]) then return 'gap' end
redis.call('HSET', KEYS[1], 'chunk_count', ARGV[1])
if state ~= 'open' then return state end
redis.call('HSET', KEYS[1], 'state', 'closed')
return 'closed'
