-- Lose a job from a chunk on, as a server does that comes back without the end of its log: who has its
-- source sends that again, in a new generation: what is leased of it commits as a duplicate.
-- KEYS: in, retry, res, meta   ARGV: first chunk that is lost, owner or ""
local state, before, owner, drained =
  unpack(redis.call('HMGET', KEYS[4], 'state', 'generation', 'owner', 'drained_upto'))
if not state or (ARGV[2] ~= '' and ARGV[2] ~= owner) then return 'gone' end
if state ~= 'open' and state ~= 'closed' and state ~= 'paused' then return state end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
redis.call('XGROUP', 'CREATE', KEYS[1], 'farm', '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', KEYS[2], 'farm', '0', 'MKSTREAM')
if state == 'closed' then state = 'open' end
local now = redis.call('TIME')
local generation = string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))
if generation == before then generation = generation .. '+' end
redis.call('HSET', KEYS[4], 'state', state, 'generation', generation, 'first_chunk', ARGV[1], 'pushed_upto', ARGV[1])
if tonumber(ARGV[1]) < tonumber(drained or 0) then redis.call('HSET', KEYS[4], 'drained_upto', ARGV[1]) end
redis.call('HDEL', KEYS[4], 'chunk_count', 'blocks_in', 'chunks_in', 'tokens_in', 'bytes_in',
  'known_in', 'blocks_done', 'chunks_done', 'known_done', 'tokens_done', 'bytes_done', 'result_bytes')
return state
