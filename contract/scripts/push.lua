-- Append the next block. A resend says 'exists'; a block after blocks that are not there (the server
-- restarted and lost them) says 'gap', so that everything below pushed_upto was in the stream.
-- KEYS: in, meta
-- ARGV: entry id, block, chunks, tokens, index after its last chunk, owner or "",
--       chunks whose vectors are known (may be left out for 0)
-- What no worker could make sense of is an error, before anything has changed.
if string.find(ARGV[3] .. ARGV[4] .. ARGV[5] .. (ARGV[7] or ''), '%D')
  or ARGV[1] ~= string.format('%d-%d', ARGV[5] - ARGV[3] + 1, ARGV[3]) then
  return redis.error_reply('ERR not <start + 1>-<chunks>, and numbers: ' .. ARGV[1])
end
local state, generation, owner = unpack(redis.call('HMGET', KEYS[2], 'state', 'generation', 'owner'))
if not state or (ARGV[6] and ARGV[6] ~= '' and ARGV[6] ~= owner) then return 'gone' end
if state ~= 'open' and state ~= 'paused' then return state end
local upto = tonumber(redis.call('HGET', KEYS[2], 'pushed_upto'))
if tonumber(ARGV[5]) <= upto then return 'exists' end
if ARGV[5] - ARGV[3] ~= upto then return 'gap' end
local added = redis.pcall('XADD', KEYS[1], ARGV[1], 'block', ARGV[2], 'count', ARGV[3],
  'tokens', ARGV[4], 'generation', generation or '')
if added.err then
  if not string.find(added.err, 'equal or smaller') then return added end
  return redis.error_reply('ERR another program has put an entry into ' .. KEYS[1]
    .. ', beyond which no block can be added; cancel the job')
end
redis.call('HSET', KEYS[2], 'pushed_upto', ARGV[5])
redis.call('HINCRBY', KEYS[2], 'blocks_in', 1)
redis.call('HINCRBY', KEYS[2], 'chunks_in', ARGV[3])
if (ARGV[7] or '0') ~= '0' then redis.call('HINCRBY', KEYS[2], 'known_in', ARGV[7]) end
redis.call('HINCRBY', KEYS[2], 'tokens_in', ARGV[4])
redis.call('HINCRBY', KEYS[2], 'bytes_in', #ARGV[2])
return 'added'
