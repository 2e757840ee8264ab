"""What follows the options in the help of the commands of this package."""

from __future__ import annotations

STATUS_EPILOG = """\
The first line says whether all is well, and if not, the most severe problem and what to do; further problems
follow, each with its severity:
  down      requests fail
  degraded  they are served worse than promised: brown-out, long waits, full KV memory, Redis away, workers
            that are refused, ejected or unreachable
  warning   they are served, and that may end: a drain, missing replicas, an index out of date, a certificate
            that ends, a planner that does not answer

With --address it asks a gateway elsewhere, in a cluster for example, and shows no processes.

exit status: 0 all is well, or only warnings; 1 nothing runs, or something is down or degraded; 2 the command
line is invalid

examples:
  kvasir status
  kvasir status -o json
  kvasir status --address https://gateway.example:8000
  kubectl exec deploy/NAME-router -- kvasir status --address 127.0.0.1:8000"""

TOP_COMMAND_EPILOG = """\
keys: 1 to 5 or Tab the view, s the column to sort by, r the other order, / filter (Esc ends it), p pause, q
quit. Views: workers, queues, tenants, requests (those that run, the longest first), slowest (of those that
ended and whose decisions are kept). Rates are those since the previous refresh. It works at 80x24, and
without colour (NO_COLOR=1); wider terminals show more. An operator's key is needed where keys are
(KVASIR_API_KEY).

With --once it prints all views as text, for pipes and tickets, with totals in place of rates.

examples:
  kvasir top
  kvasir top --view tenants --sort OUT/S
  kvasir top --view requests --filter acme
  kvasir top --once | less
  kubectl exec -it deploy/NAME-router -- kvasir top --address 127.0.0.1:8000"""

TRACE_EPILOG = """\
Phases follow each other from the request's arrival:
  queue         in the router, until it was sent to a worker
  engine_queue  in the worker, until its engine began the prompt
  tiers         loading KV of its prefix from memory, disk or Redis
  prefill       computing the prompt
  transfer      KV moves to the worker that decodes
  decode        from there to the first token
  stream        from the first token to the last
Below is what a request that has ended claims of the time of each worker: of computing its prompt, of steps,
of memory that it held and that it held while KV moved, and work in vain. Claims are proportions: what
`kvasir cost` shows is the busy time of a pool, divided by them. Then follows its routing decision, as
`kvasir explain REQUEST_ID` prints it. A request that runs is shown as far as it is. The router keeps running
requests and the latest that ended (routing.decision_records in kvasir.yaml).

examples:
  kvasir trace da87cef2245951d6dc2c075d
  kvasir trace da87cef2245951d6dc2c075d -o json
  kvasir tail --slow                      (ids of slow requests as they end)"""

TAIL_EPILOG = """\
Prints a line when a request ends: time, outcome, tenant, model, duration, TTFT, mean time between tokens,
tokens in (cached) and out, and the id for `kvasir trace`; a ! after the outcome marks a missed SLO. Requests
that arrived before the command are not shown. No content is read. Routers keep what is not read for half a
minute; what they had to drop is reported. Ctrl-C ends it. An operator's key is needed where keys are
(KVASIR_API_KEY). With several routers, name each, or their Service.

examples:
  kvasir tail
  kvasir tail --slow --failed
  kvasir tail --tenant acme --slow 2s
  kvasir tail -o json --requests 100
  kubectl exec deploy/NAME-router -- kvasir tail --service NAME-router"""

LOGS_EPILOG = """\
On one machine it reads the files that `kvasir up` keeps (their folder is the last line of `kvasir status`).
In a pod of a cluster it asks the API server for the log of the worker's pod, as `kubectl logs` does; if its
service account may not read logs, the command to run elsewhere is printed.

--since keeps lines without a time with the line before them.

examples:
  kvasir logs router -f
  kvasir logs decode-7f3a91c2 --since 10m
  kvasir logs decode -n 50
  kubectl exec deploy/NAME-router -- kvasir logs WORKER -f"""
