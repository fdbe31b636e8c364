#!lua flags=allow-oom
-- Add to the counters of a model. There are counters of so many models, and one set for all that come later.
-- KEYS: model-counts   ARGV: model, most fields, name of the later ones, then name and amount of each counter
local model = ARGV[1]
if not redis.call('HGET', KEYS[1], ARGV[4] .. ' ' .. model)
    and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[2]) then
  model = ARGV[3]
end
for i = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i] .. ' ' .. model, ARGV[i + 1]) end
return model
