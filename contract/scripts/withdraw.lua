#!lua flags=allow-oom
-- Take what is left of a request out of its lane, and forget its answers.
-- KEYS: lane, reply, sizes   ARGV: engine, entry ids
for i = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if entry then
    redis.call('XACK', KEYS[1], 'farm', ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    redis.pcall('HINCRBY', KEYS[3], ARGV[1], -#(entry[2][4] or ''))
  end
end
redis.call('UNLINK', KEYS[2])
return 'withdrawn'
