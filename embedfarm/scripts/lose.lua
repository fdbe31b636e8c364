-- Lose a job from a chunk on, as a server does that comes back without the end of its log: who has its
-- source sends that again. What is leased of it commits as a duplicate.
-- KEYS: in, retry, res, meta   ARGV: first chunk that is lost
local state = redis.call('HGET', KEYS[4], 'state')
if not state then return 'gone' end
if state ~= 'open' and state ~= 'closed' and state ~= 'paused' then return state end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', KEYS[2], 'farm', '0', 'MKSTREAM')
if state == 'closed' then state = 'open' end
redis.call('HSET', KEYS[4], 'state', state, 'first_chunk', ARGV[1], 'pushed_upto', ARGV[1])
redis.call('HDEL', KEYS[4], 'chunk_count', 'blocks_in', 'chunks_in', 'tokens_in', 'bytes_in',
  'blocks_done', 'chunks_done', 'tokens_done', 'bytes_done', 'result_bytes')
return state
