#!lua flags=allow-oom
-- Keep of a job that has ended only what people look at: its meta, and the newest of its failures.
-- KEYS: meta, failed, and all other keys of the job
-- ARGV: state, reason, seconds to keep it, failures to keep, owner or "", then field and value of each counter
local found, owner = unpack(redis.call('HMGET', KEYS[1], 'state', 'owner'))
if not found or (ARGV[5] ~= '' and ARGV[5] ~= owner) then return 'gone' end
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2], 'result_bytes', 0,
  'canaries', '',
  'ended_ms', now[1] * 1000 + math.floor(now[2] / 1000), unpack(ARGV, 6))
if ARGV[1] == 'finished' then
  -- A server that came back without its last writes may not know what was done: its results were taken.
  for _, unit in ipairs({'blocks', 'chunks', 'tokens', 'bytes'}) do
    redis.call('HSET', KEYS[1], unit .. '_done', redis.call('HGET', KEYS[1], unit .. '_in') or 0)
  end
end
redis.call('XTRIM', KEYS[2], 'MAXLEN', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return ARGV[1]
