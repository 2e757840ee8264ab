"""Redis scripts for the rate limits of tenants: the arithmetic of `buckets`, in one atomic step each.

A tenant is one hash: `r` and `t` are the times at which its buckets of requests and of tokens are full again,
and each router has a field with its number of running requests and its last heartbeat. A router without a
heartbeat for a while is considered gone, with its running requests. Times are the server's, in seconds since
a recent day, so that a double holds microseconds. What routers that do not reach the server may run is a
field like that of a router. If the clock is set back, requests must not be refused for longer than empty
buckets do, so a state further ahead is reduced.
"""

from __future__ import annotations

from kvasir.ports.limits import LENT_S

STALE_S = int(LENT_S)
"""A router sends heartbeats three times as often."""
_KEEP_S = 180
_HEAD = f"""
local key, replica = KEYS[1], ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] - 1700000000 + clock[2] / 1000000
local function number(index) return tonumber(ARGV[index]) end
local function ran(count)
  if count > 0 then redis.call('HSET', key, replica, string.format('%d:%.6f', count, now))
  else redis.call('HDEL', key, replica) end
  redis.call('EXPIRE', key, {_KEEP_S})
end
"""

#: ARGV: router, requests per minute, tokens per minute, concurrency (0: no limit), tokens. Returns the
#: exceeded limit (0: none, and all is charged), the wait for it, and both buckets' levels, in µs.
TAKE = (
    _HEAD
    + f"""
local per_min, tokens, most, amount = number(2), number(3), number(4), number(5)
local full = {{r = now, t = now}}
local running, own = 0, 0
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local name, value = all[i], all[i + 1]
  if full[name] then full[name] = math.min(math.max(now, tonumber(value)), now + 120)
  else
    local count, seen = string.match(value, '^(%d+):(.+)$')
    if now - seen > {STALE_S} then redis.call('HDEL', key, name)
    else
      running = running + count
      if name == replica then own = tonumber(count) end
    end
  end
end
local r, t = full.r, full.t
if per_min > 0 then r = r + 60 / per_min end
if tokens > 0 then t = t + amount * 60 / tokens end
local waits = {{r - now - 60, t - now - 60, 0}}
if most > 0 and running >= most then waits[3] = 1 end
local why, longest = 0, 0.000002
for i = 1, 3 do
  if waits[i] > longest then why, longest = i, waits[i] end
end
if why > 0 then r, t = full.r, full.t
else
  redis.call('HSET', key, 'r', string.format('%.6f', r), 't', string.format('%.6f', t))
  ran(own + 1)
end
local function micro(seconds) return math.ceil(seconds * 1000000) end
return {{why, why > 0 and micro(longest) or 0, micro(r - now), micro(t - now)}}
"""
)

#: ARGV: router, requests per minute, tokens per minute, and the change of each charge (negative: a
#: refund).
SETTLE = (
    _HEAD
    + """
local function charge(name, per_min, amount)
  if per_min > 0 and amount ~= 0 then
    local full = math.max(now, tonumber(redis.call('HGET', key, name) or now))
    full = math.min(full + amount * 60 / per_min, now + 120)
    redis.call('HSET', key, name, string.format('%.6f', full))
  end
end
charge('r', number(2), number(4))
charge('t', number(3), number(5))
local own = redis.call('HGET', key, replica)
ran((own and tonumber(string.match(own, '^%d+')) or 0) - 1)
return 0
"""
)

#: ARGV: router, and the number of the tenant's requests that it runs.
BEAT = (
    _HEAD
    + """
ran(number(2))
return 0
"""
)

#: ARGV: router, `r` or `t`, the limit per minute, and the amounts that are wanted and returned. Returns the
#: amount that is taken, in millionths.
ALLOT = (
    _HEAD
    + f"""
local field, per_min, wanted, returned = ARGV[2], number(3), number(4), number(5)
local full = math.min(math.max(now, tonumber(redis.call('HGET', key, field) or now)), now + 120)
full = math.max(now, full - returned * 60 / per_min)
local amount = math.max(0, math.min(wanted, (now + 60 - full) * per_min / 60))
redis.call('HSET', key, field, string.format('%.6f', full + amount * 60 / per_min))
redis.call('EXPIRE', key, {_KEEP_S})
return math.floor(amount * 1000000)
"""
)

#: ARGV: borrower, concurrency, and the slots that it wants and the requests that it runs. Returns its slots.
LEND = (
    _HEAD
    + f"""
local most, wanted, runs = number(2), number(3), number(4)
local others, own = 0, 0
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local count, seen = string.match(all[i + 1], '^(%d+):(.+)$')
  if count and now - seen <= {STALE_S} then
    if all[i] == replica then own = tonumber(count) else others = others + count end
  end
end
local slots = math.max(0, math.min(wanted, math.max(most - others, own)))
ran(math.max(slots, runs))
return slots
"""
)
