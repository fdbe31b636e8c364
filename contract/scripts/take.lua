-- Lease pieces of requests: one whose worker fell silent, by itself, because it may be what silenced
-- it; else new ones, until they have enough bytes together.
-- KEYS: lane   ARGV: worker, lease in ms, bytes
-- Answers the unix ms, how often they were delivered, and the entries.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', KEYS[1]) == 0 then return {now, 0, {}} end
for _, row in ipairs(redis.call('XPENDING', KEYS[1], 'farm', 'IDLE', ARGV[2], '-', '+', 8)) do
  local entries = redis.call('XCLAIM', KEYS[1], 'farm', ARGV[1], ARGV[2], row[1])
  if #entries > 0 then return {now, row[4] + 1, entries} end
end
local entries, bytes = {}, 0
while bytes < tonumber(ARGV[3]) do
  local read = redis.call('XREADGROUP', 'GROUP', 'farm', ARGV[1], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
  if not read then break end
  local entry = read[1][2][1]
  entries[#entries + 1] = entry
  bytes = bytes + #(entry[2][4] or '')
end
return {now, 1, entries}
