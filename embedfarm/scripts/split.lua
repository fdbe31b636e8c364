-- Replace a block that failed too often by smaller ones, so that a bad chunk ends up alone.
-- KEYS: in|retry, retry, meta   ARGV: entry id, its bytes, then block, chunks, tokens of each piece
if #redis.call('XPENDING', KEYS[1], 'farm', ARGV[1], ARGV[1], 1) == 0 then return 'duplicate' end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local grown = -ARGV[2]
for i = 3, #ARGV, 3 do
  redis.call('XADD', KEYS[2], '*', 'block', ARGV[i], 'count', ARGV[i + 1], 'tokens', ARGV[i + 2])
  grown = grown + #ARGV[i]
end
redis.call('HINCRBY', KEYS[3], 'bytes_in', grown)
redis.call('HINCRBY', KEYS[3], 'blocks_in', (#ARGV - 2) / 3 - 1)
return 'split'
