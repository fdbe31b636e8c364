#!lua flags=allow-oom
-- Store the result of one block and acknowledge it, or change nothing at all.
-- A block that is no longer pending was committed by somebody else: stragglers' copies, retries
-- after a lost reply and zombies all end here, those too whose job was made anew meanwhile.
-- KEYS: in|retry, res, meta, failed, result wake-up
-- ARGV: entry id, start, result, chunks, tokens, block bytes, real tokens, vector bytes,
--       generation of the block, worker, chunks that it embedded, fingerprint that it agreed on
--       with others or "", devices' microseconds, their cost in millionths, digest of the canaries that it agreed on
--       with others or "", bytes that the server holds of each vector if they are stored elsewhere or 0,
--       then index, reason, attempts of what failed
local generation, agreed, canaries = unpack(redis.call('HMGET', KEYS[3], 'generation', 'fingerprint', 'canaries_digest'))
if (generation or '') ~= ARGV[9] then return 'duplicate' end
if #redis.call('XPENDING', KEYS[1], 'farm', ARGV[1], ARGV[1], 1) == 0 then return 'duplicate' end
-- A server that came back may have lost what its workers agreed on, and kept the job.
if ARGV[12] ~= '' and agreed and agreed ~= ARGV[12] then return 'unsettled' end
if ARGV[15] ~= '' and canaries ~= ARGV[15] then return 'unsettled' end
if ARGV[12] ~= '' and not agreed then redis.call('HSET', KEYS[3], 'fingerprint', ARGV[12]) end
redis.call('XACK', KEYS[1], 'farm', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
if redis.call('HGET', KEYS[3], 'state') == 'cancelled' then return 'cancelled' end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
local now = redis.call('TIME')
redis.call('HSET', KEYS[3], 'last_commit_ms', now[1] * 1000 + math.floor(now[2] / 1000),
  'vector_bytes', ARGV[8])
if ARGV[16] ~= '0' then redis.call('HSET', KEYS[3], 'receipt_bytes', ARGV[16]) end
redis.call('HINCRBY', KEYS[3], 'blocks_done', 1)
redis.call('HINCRBY', KEYS[3], 'chunks_done', ARGV[4])
if ARGV[4] ~= ARGV[11] then redis.call('HINCRBY', KEYS[3], 'known_done', ARGV[4] - ARGV[11]) end
redis.call('HINCRBY', KEYS[3], 'chunks:' .. ARGV[10], ARGV[11])
redis.call('HINCRBY', KEYS[3], 'tokens_done', ARGV[5])
redis.call('HINCRBY', KEYS[3], 'bytes_done', ARGV[6])
redis.call('HINCRBY', KEYS[3], 'real_tokens_done', ARGV[7])
redis.call('HINCRBY', KEYS[3], 'result_bytes', #ARGV[3])
if ARGV[13] ~= '0' then redis.call('HINCRBY', KEYS[3], 'device_us', ARGV[13]) end
if ARGV[14] ~= '0' then redis.call('HINCRBY', KEYS[3], 'cost_micros', ARGV[14]) end
for i = 17, #ARGV, 3 do
  redis.call('HINCRBY', KEYS[3], 'chunks_failed', 1)
  redis.call('XADD', KEYS[4], 'MAXLEN', '10000', '*',
    'index', ARGV[i], 'reason', ARGV[i + 1], 'attempts', ARGV[i + 2])
end
local state, count, blocks_in, blocks_done, max_hours, max_cost, device_us, cost = unpack(redis.call('HMGET', KEYS[3],
  'state', 'chunk_count', 'blocks_in', 'blocks_done', 'max_hours', 'max_cost', 'device_us', 'cost_micros'))
local hours_left = tonumber(max_hours or 0) == 0 or tonumber(device_us or 0) < max_hours * 3.6e9
local cost_left = tonumber(max_cost or 0) == 0 or tonumber(cost or 0) < max_cost * 1e6
if (state == 'open' or state == 'closed') and not (hours_left and cost_left)
  and not (count and tonumber(blocks_done) >= tonumber(blocks_in)) then
  redis.call('HSET', KEYS[3], 'state', 'paused', 'braked', hours_left and 'max_cost' or 'max_hours')
end
redis.call('LPUSH', KEYS[5], '1')
redis.call('LTRIM', KEYS[5], '0', '0')
return 'committed'
