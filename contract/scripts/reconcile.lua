#!lua flags=allow-oom
-- Find which chunks the server still has, and take blocks for those that it has not.
-- An entry counts if it will be delivered, or is leased. With blocks, entries that somebody has
-- acknowledged and leases on entries that somebody has deleted go: they are nobody's work.
-- KEYS: in, retry, res, meta   ARGV: owner or "", then block, start, chunks, tokens of each block
-- Answers how far the job is on disk and pushed; then the start and the chunks of each result, of
-- what waits, of what is leased, and of the blocks that were taken.
local facts = redis.call('HMGET', KEYS[4], 'state', 'drained_upto', 'pushed_upto', 'refilled_upto', 'generation',
  'owner')
if not facts[1] or (ARGV[1] ~= '' and ARGV[1] ~= facts[6]) then return false end
local drained, pushed, refilled = tonumber(facts[2]), tonumber(facts[3]), tonumber(facts[4] or 0)
local refill = #ARGV > 1 and (facts[1] == 'open' or facts[1] == 'closed' or facts[1] == 'paused')
local results, waiting, leased, added, covered = {}, {}, {}, {}, {}
local left = {blocks = 0, chunks = 0, tokens = 0, bytes = 0}
local result_bytes = 0

local function cover(list, start, count)
  list[#list + 1], list[#list + 2] = start, count
  covered[#covered + 1] = {start, start + count}
end

local function is_free(start, count)
  for _, range in ipairs(covered) do
    if start < range[2] and range[1] < start + count then return false end
  end
  return true
end

local function count(data, chunks, tokens)
  left.blocks, left.chunks = left.blocks + 1, left.chunks + chunks
  left.tokens, left.bytes = left.tokens + tokens, left.bytes + #data
end

local function is_count(value)
  return type(value) == 'number' and 0 <= value and value <= 2 ^ 53 and value % 1 == 0
end

-- The first integers of a record, behind its version and the head of its array; none of what is
-- damaged there.
local function head(data, integers)
  local ok, _, start, chunks = pcall(cmsgpack.unpack_limit, string.sub(data, 3, 64), integers)
  if ok and is_count(start) and (integers == 1 or is_count(chunks)) then return start, chunks end
end

-- ID of the last entry that was delivered; nothing while nobody can read the stream.
local function last_delivered(k)
  if refill then redis.pcall('XGROUP', 'CREATE', KEYS[k], 'farm', '0', 'MKSTREAM') end
  if redis.call('EXISTS', KEYS[k]) == 0 then return end
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[k])) do
    if group[2] == 'farm' then return group[8] end
  end
end

local function numbers(id)
  local first, second = string.match(id, '(%d+)-(%d+)')
  return tonumber(first), tonumber(second)
end

local function look(k, id, fields, list)
  local field = {}
  for i = 1, #fields, 2 do field[fields[i]] = fields[i + 1] end
  local start = numbers(id) - 1
  if k == 2 then start = head(field.block or '', 1) end
  if start and field.block then
    cover(list, start, tonumber(field.count or 1))
    count(field.block, tonumber(field.count or 1), tonumber(field.tokens or 1))
  end
end

for k = 1, 2 do
  local last, held, from, entries = last_delivered(k), {}, '-', {}
  if last then
    local major, minor = numbers(last)
    for _, row in ipairs(redis.call('XPENDING', KEYS[k], 'farm', '-', '+', 1000000)) do
      held[row[1]] = true
    end
    repeat
      entries = redis.call('XRANGE', KEYS[k], from, '+', 'COUNT', 64)
      for _, entry in ipairs(entries) do
        local first, second = numbers(entry[1])
        from = '(' .. entry[1]
        if held[entry[1]] then
          look(k, entry[1], entry[2], leased)
        elseif first > major or (first == major and second > minor) then
          look(k, entry[1], entry[2], waiting)
        elseif refill then
          redis.call('XDEL', KEYS[k], entry[1])
        end
        held[entry[1]] = nil
      end
    until #entries == 0
    if refill then
      for id in pairs(held) do redis.call('XACK', KEYS[k], 'farm', id) end
    end
  end
end
for _, start in ipairs(redis.call('HKEYS', KEYS[3])) do
  local data = redis.call('HGET', KEYS[3], start)
  local first, chunks = head(data, 2)
  result_bytes = result_bytes + #data
  if chunks then cover(results, first, chunks) end
end
if refill then
  for i = 2, #ARGV, 4 do
    local start, chunks = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    if start >= drained and start + chunks <= pushed and is_free(start, chunks) then
      redis.call('XADD', KEYS[2], '*', 'block', ARGV[i], 'count', ARGV[i + 2], 'tokens', ARGV[i + 3],
        'start', start, 'generation', facts[5] or '')
      cover(added, start, chunks)
      count(ARGV[i], chunks, tonumber(ARGV[i + 3]))
      refilled = math.max(refilled, start + chunks)
    end
  end
  -- What is done follows from what is not.
  for name, value in pairs(left) do
    local into = tonumber(redis.call('HGET', KEYS[4], name .. '_in') or 0)
    redis.call('HSET', KEYS[4], name .. '_done', math.max(0, into - value))
  end
  redis.call('HSET', KEYS[4], 'result_bytes', result_bytes, 'refilled_upto', refilled)
end
return {{drained, pushed}, results, waiting, leased, added}
