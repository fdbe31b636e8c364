-- Append one block. The explicit ID makes a resend harmless: 'exists' instead of a second entry.
-- KEYS: in, meta   ARGV: entry id, block, chunks, tokens, index after its last chunk
local state = redis.call('HGET', KEYS[2], 'state')
if not state then return 'gone' end
if state ~= 'open' and state ~= 'paused' then return state end
local added = redis.pcall('XADD', KEYS[1], ARGV[1],
  'block', ARGV[2], 'count', ARGV[3], 'tokens', ARGV[4])
if type(added) == 'table' and added.err then
  if string.find(added.err, 'equal or smaller') then return 'exists' end
  return added
end
redis.call('HSET', KEYS[2], 'pushed_upto', ARGV[5])
redis.call('HINCRBY', KEYS[2], 'blocks_in', 1)
redis.call('HINCRBY', KEYS[2], 'chunks_in', ARGV[3])
redis.call('HINCRBY', KEYS[2], 'tokens_in', ARGV[4])
redis.call('HINCRBY', KEYS[2], 'bytes_in', #ARGV[2])
return 'added'
