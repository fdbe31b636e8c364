#!lua flags=allow-oom
-- Replace a block that failed too often by smaller ones, so that a bad chunk ends up alone.
-- KEYS: in|retry, retry, meta
-- ARGV: entry id, its bytes, its tries, its generation, then block, chunks, tokens, first chunk of each piece
if (redis.call('HGET', KEYS[3], 'generation') or '') ~= ARGV[4] then return 'duplicate' end
if #redis.call('XPENDING', KEYS[1], 'farm', ARGV[1], ARGV[1], 1) == 0 then return 'duplicate' end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local grown = -ARGV[2]
for i = 5, #ARGV, 4 do
  redis.call('XADD', KEYS[2], '*', 'block', ARGV[i], 'count', ARGV[i + 1], 'tokens', ARGV[i + 2],
    'start', ARGV[i + 3], 'attempts', ARGV[3], 'generation', ARGV[4])
  grown = grown + #ARGV[i]
end
redis.call('HINCRBY', KEYS[3], 'bytes_in', grown)
redis.call('HINCRBY', KEYS[3], 'blocks_in', (#ARGV - 4) / 4 - 1)
return 'split'
