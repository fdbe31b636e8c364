#!lua flags=allow-oom
-- Take room of the farm's window for blocks that are about to be pushed: for as many of them, in order, as
-- there is room for. The last quarter is for jobs that have less than their fair share on the server.
-- KEYS: window   ARGV: tenant, bytes that the job has on the server, 1 if all that was pushed of it was
--       collected (its first block is let through in any case), ms after which a count is old, ms that
--       somebody may take to count, ms that all of this is kept, then bytes of each block, with the vectors
--       that it will become
-- Answers how many blocks have room, and a turn: if it is not 0, the caller must count anew (see `count`)
-- and ask again, and nobody else counts meanwhile.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local facts = redis.call('HMGET', KEYS[1],
  'counted', 'turn', 'max', 'free', 'taken', 'share', 'share:' .. ARGV[1])
for i = 1, 7 do facts[i] = tonumber(facts[i] or nil) end
local counted, turn, max, free, taken = unpack(facts, 1, 5)
local share = facts[7] or facts[6]

local function is_over(since, ms)
  return not since or math.abs(now - since) >= tonumber(ms)
end

if is_over(turn, ARGV[5]) and (not (max and free and share) or is_over(counted, ARGV[4])) then
  -- What was taken since the last count may not have been pushed when the next one looks.
  redis.call('HSET', KEYS[1], 'turn', now, 'before', taken or 0, 'taken', 0)
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
  return {0, now}
end
if not (max and free and share) then return {(ARGV[3] == '1' and #ARGV > 6) and 1 or 0, 0} end
local held, granted, sum = tonumber(ARGV[2]), 0, 0
for i = 7, #ARGV do
  local cost = tonumber(ARGV[i])
  local room = free - sum
  if held + sum + cost > share then room = room - max / 4 end
  if cost > room and not (granted == 0 and ARGV[3] == '1') then break end
  granted, sum = granted + 1, sum + cost
end
if sum > 0 then
  redis.call('HINCRBY', KEYS[1], 'free', -sum)
  redis.call('HINCRBY', KEYS[1], 'taken', sum)
end
if granted < #ARGV - 6 then redis.call('HSET', KEYS[1], 'refused', now) end
return {granted, 0}
