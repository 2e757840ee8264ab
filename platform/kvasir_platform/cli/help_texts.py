"""What follows the options in `kvasir COMMAND --help`: how each command is used."""

from __future__ import annotations

TOP_EPILOG = """\
examples:
  kvasir up                                  serve the model that ships with Kvasir
  kvasir up -f kvasir.yaml --port 9000       serve what a file describes
  kvasir up --set model.source=./my-llama    change one field, without a file
  kvasir check -f kvasir.yaml                check whether it would start here
  kvasir plan llama-3.1-8b --rate 10         what to run for a load, and what it costs
  kvasir status                              whether all is well, workers, load, processes
  kvasir top                                 workers, queues, tenants and requests, live
  kvasir tail --slow --failed                requests that were slow or failed, as they end
  kvasir trace REQUEST_ID                    where the time of a request went
  kvasir logs WORKER -f                      the log of a worker, or of the router
  kvasir get workers                         each worker's blocks, and how well the router knows them
  kvasir explain REQUEST_ID                  why a request ran where it ran, and its outcome
  kvasir explain                             what better decisions would have saved, and why
  kvasir explain scaling                     why each pool has its size
  kvasir scale decode=4                      set a pool's size; decode=auto returns it to the planner
  kvasir drain WORKER                        take a worker out of service without losing a stream
  kvasir restart POOL                        replace a pool's workers one by one, while it serves
  kvasir verify                              whether answers are right, and how fast they come
  kvasir bench http://HOST:8000              load any OpenAI-compatible endpoint, and measure it
  kvasir batch submit requests.jsonl         run requests in capacity that others leave
  kvasir lora load NAME SOURCE               serve a LoRA adapter, without a restart
  kvasir rollout start ROUTE                 try a canary, which is promoted or rolled back by itself
  kvasir picker --pool NAME                  pick model servers for a gateway with an InferencePool
  kvasir record traffic.jsonl                what arrives, how it goes and why, for replays; no content
  kvasir keys create --tenant research       an API key for a client
  kvasir down                                stop it, from any terminal

exit status: 0 done, 1 failed or nothing runs, 2 the command line or kvasir.yaml is invalid, 130 or 143 a
start was interrupted

Files live in ~/.kvasir (or $KVASIR_HOME): logs and state of each deployment."""

UP_EPILOG = """\
Checks the machine first, then starts Ray, the pools of kvasir.yaml, the router and the gateway,
and stays in the foreground. Ctrl-C (or `kvasir down`) stops and removes everything; a
second Ctrl-C does not wait for running requests. Interrupted before it is ready, it exits with 130
(Ctrl-C) or 143 (SIGTERM).

examples:
  kvasir up
  kvasir up -f deploy/examples/aggregated.yaml
  kvasir up --set pools.decode.replicas=2 --set gateway.port=0
  kvasir up --detach && kvasir status && kvasir down"""

CHECK_EPILOG = """\
Checks the file, the model, the port, memory, CPUs, shared memory, limits and installed packages, and
starts nothing. `kvasir up` runs the same checks first.

With --fit it asks one question, and this machine needs no GPU for it: does each model fit on the GPUs
that `pools[].gpu` or --gpu name? It reads config.json and the headers of the weights, of a folder or of
the Hugging Face Hub. The chart runs it before an installation and an upgrade.

examples:
  kvasir check
  kvasir check -f kvasir.yaml -o json
  kvasir check --fit -f kvasir.yaml --gpu decode=H100"""

GET_EPILOG = """\
KV is how well the router knows the blocks in a worker's prefix cache:
  exact        every reported change is applied
  catching_up  a snapshot is in transfer; until then the router uses its own predictions
  predicted    the worker does not report, or its reports are not trusted; see REASON
BLOCKS are reported by the worker, PREDICTED by the router from the requests that it sent.

examples:
  kvasir get workers
  kvasir get workers -o json
  KVASIR_API_KEY=… kvasir get workers --address https://gateway.example:8000"""

EXPLAIN_EPILOG = """\
REQUEST_ID is the response's header x-request-id (or `id` in its body). The output has the candidate workers,
the cost of each, the choice, and predicted against actual values. Columns of zeros are left out; -o json has
them.

The router keeps the decisions of running requests and of the latest that ended, up to
routing.decision_records in kvasir.yaml.

Without REQUEST_ID, it shows what other decisions would have saved, by the cost model with hindsight, and why:
an index out of date, a queue that was longer, and other causes (see docs/POLICIES.md).

`kvasir explain scaling` shows the desired size of each pool, the reasons, and recent actions of the planner.
It queries the control process: on this machine, or in the head's pod of a cluster.

examples:
  curl -si http://127.0.0.1:8000/v1/chat/completions … | grep x-request-id
  kvasir explain
  kvasir explain scaling
  kvasir explain da87cef2245951d6dc2c075d
  kvasir explain da87cef2245951d6dc2c075d -o json"""

DRAIN_EPILOG = """\
The worker gets no new requests from any router and completes those it runs; the command waits for that.
Then the process can be stopped or its machine removed. `kvasir get workers` lists the names, and which
workers drain, and why. Ctrl-C ends the wait, not the drain.

--undo puts the worker back. A drain lasts until the worker's process ends; a worker that is being stopped
continues to drain.

examples:
  kvasir drain decode-7f
  kvasir drain decode-7f --reason "kernel update" --timeout 600
  kvasir drain decode-7f --no-wait
  kvasir drain decode-7f --undo"""

RESTART_EPILOG = """\
Each new worker starts beside the one that it replaces, with the code that is installed then. The old
one gets no new requests and completes those it runs (worker.drain_s); the rest fails over to other workers.
If no GPU is free for one more, each is stopped first; a pool's only worker is then not restarted.

Workers of another protocol, hash version, model, tokenizer or KV layout than the running ones do not start:
the restart ends there, and the old ones continue to serve.

examples:
  kvasir restart decode
  kvasir restart prefill -o json"""

SCALE_EPILOG = """\
A pool with `scaling` keeps the size, whatever the plan, until auto returns it to the planner, also over a
restart of the control process. Any other pool keeps it until its size in kvasir.yaml changes. Surplus
replicas drain first (worker.drain_s).

examples:
  kvasir scale decode=4
  kvasir scale prefill=2 decode=6
  kvasir scale decode=auto"""

VERIFY_EPILOG = """\
Sends requests to a running deployment, which goes on serving its other clients, and compares greedy tokens
as the router decides (prefill and decode apart, or from the prefix cache) with the same request whole on one
worker. Then it measures TTFT, ITL and throughput at several loads, and waits until no request, KV block or
lease is left. A difference where the reference itself holds two tokens for nearly equally likely passes.

With --quality it also scores held-out text: perplexity, and against a baseline the share of positions with
the same most likely token and the KL divergence. The baseline is the model before it was quantized: a saved
PREFIX.quality.json, another gateway (with the same API key), or a model of the same deployment.

The report names the hardware: PREFIX.json and PREFIX.html. An operator's key is needed where keys are
(KVASIR_API_KEY). Exit status 1: a check failed.

examples:
  kvasir verify
  kvasir verify --report /tmp/verify --link-gbps 400
  kvasir verify --prompt-tokens 1000,8000 --streams 1,16,64
  kvasir verify --streams 0 --quality --report before      (the original deployment)
  kvasir verify --streams 0 --quality-baseline before.quality.json --max-kl 0.02      (the quantized one)
  kubectl exec deploy/NAME-router -- kvasir verify --address 127.0.0.1:8000"""

BENCH_EPILOG = """\
Loads any server that speaks OpenAI's API, Kvasir's or another, and reports TTFT, ITL, TPOT and E2E, rates,
goodput at an SLO, and errors by kind. Without --concurrency the loop is open: requests are sent at the times
of the workload, whether or not earlier ones have ended. --ramp raises the rate until the SLO breaks.

Prompts have the requested lengths without the model's tokenizer: two probes measure how many tokens the
server counts for a word. They share prefixes as the workload says, and differ from run to run. If the server
refuses ignore_eos, outputs may be shorter than requested; the report says so.

TTFT is from sending to the first chunk with output; ITL are the gaps between chunks; TPOT is the time from
the first to the last chunk over the tokens after the first. Own lateness is by how much the load generator
itself missed the times of its workload.

The API key is $KVASIR_API_KEY, or that of --api-key-env or --api-key-file. Ctrl-C ends the load and prints
the results so far; a second one ends the command. Exit status 1: no request succeeded, or with --fail-above a
figure became worse.

examples:
  kvasir bench http://127.0.0.1:8000
  kvasir bench http://127.0.0.1:8000 --workload chat:rate=4,duration=300 --html chat.html
  kvasir bench https://api.example --model NAME --api-key-env OPENAI_API_KEY --concurrency 16 --requests 200
  kvasir bench http://127.0.0.1:8000 --ramp --slo ttft=500ms,itl=50ms --json ramp.json
  kvasir bench http://127.0.0.1:8000 --workload mooncake_conversation.jsonl:speed=0.1,requests=500
  kvasir bench compare before.json after.json --fail-above 5

"""

CALIBRATE_EPILOG = """\
Sends a few minutes of requests to a running deployment, which goes on serving its other clients: prompts of
several lengths alone and behind a cached prefix, streams at several concurrencies and contexts, prompts that
arrive together, and prompts beside streams. From the server's own timings it fits the coefficients of the
performance model, and writes them with their residuals, the hardware, versions and the shape of the engine
to a profile. Other load at the same time makes the figures worse.

A profile replaces data-sheet figures where its hardware and model match: name it in kvasir.yaml as
performance.profile. See docs/PERFORMANCE_MODEL.md.

examples:
  kvasir calibrate
  kvasir calibrate --profile h100-llama.json --repeats 9
  kvasir calibrate --address gateway.example.com:8000 --model llama
  kubectl exec deploy/NAME-router -- kvasir calibrate --address 127.0.0.1:8000 --profile /tmp/p.json"""

LORA_EPILOG = """\
An adapter is served as a model of its own name as soon as it is loaded. It needs lora_loading.allow in
kvasir.yaml, which lists the sources that may be loaded from; an operator's key is needed where keys are
(KVASIR_API_KEY). Workers that join later load it too. It is forgotten when all workers that hold it have
ended: list what must survive that in `lora` of kvasir.yaml.

examples:
  kvasir lora list
  kvasir lora load sql /models/adapters/sql
  kvasir lora unload sql"""

LORA_LOAD_EPILOG = """\
SOURCE must be in lora_loading.allow. A folder must be readable by every worker under the same path; from S3
or Hugging Face each worker downloads it. The files are adapter_config.json and adapter_model.safetensors, as
PEFT writes them. With --replicas, only that many workers of each pool load it, and its requests run there.

examples:
  kvasir lora load sql /models/adapters/sql
  kvasir lora load sql s3://my-bucket/adapters/sql --replicas 1
  kvasir lora load sql my-org/sql-lora@v2 --model llama"""

LORA_UNLOAD_EPILOG = """\
New requests get 404 at once. Those that run continue; the command waits for them, and the worker removes the
adapter after the last. Ctrl-C ends the wait, not the removal. The name can then be given to another adapter:
no cached prefix of the old one is used for it.

examples:
  kvasir lora unload sql
  kvasir lora unload sql --timeout 600"""

RECORD_EPILOG = """\
Reads from the running routers what they record while somebody reads, and writes one line for each request
that arrived and ended: arrival, lengths, salted names of the prompt's blocks, outcome (code, TTFT, ITL,
tokens) and the router's decision. No text and no token is in it. `kvasir bench` and trace replays take the
file (docs/WORKLOADS.md); docs/RECORDING.md describes its fields. An operator's key is needed where keys are
(KVASIR_API_KEY).

Ctrl-C ends the recording and keeps the file. With several routers, name each of them, or in Kubernetes their
Service. Names are salted: what is equal in this recording is equal in others only with the same --salt-file.

examples:
  kvasir record traffic.jsonl
  kvasir record traffic.jsonl --duration 15m --requests 50000
  kvasir record day.jsonl --duration 24h --bytes 500M --keep 10
  kvasir record traffic.jsonl --address router-0:8000 --router router-1:8000
  kubectl exec deploy/NAME-router -- kvasir record - --service NAME-router > traffic.jsonl"""

KEYS_EPILOG = """\
Only a hash of a key is stored, from which the key cannot be recovered. Keys are stored in the Redis that
routers share (gateway.api_keys_redis), or else in the file or folder that kvasir.yaml names. Gateways read
them every second, so that a new key is accepted, and a revoked one refused, within two seconds and without
a restart.

examples:
  kvasir keys create --tenant research --days 90 --scopes inference,embeddings
  kvasir keys list
  kvasir keys rotate 3f9a6c0d21be --overlap 48h
  kvasir keys revoke 3f9a6c0d21be"""

KEYS_STORE_EPILOG = """\
Only a hash of a key is stored; an id is the beginning of it. Without --keys-file, keys are stored in the file
or folder that kvasir.yaml names. `kvasir keys new` prints a line to store elsewhere, as in a Secret.

examples:
  kvasir keys create --tenant research --days 90
  kvasir keys new --tenant research --scopes inference
  kvasir -o json keys list
  kvasir keys revoke 3f9a6c0d21be --keys-file /etc/kvasir/keys"""

KEYS_ROTATE_EPILOG = """\
The successor has the tenant and the scopes of the key, and both are valid during the overlap: move the
clients over within it.

examples:
  kvasir keys rotate 3f9a6c0d21be
  kvasir keys rotate 3f9a6c0d21be --overlap 2h --days 30"""

BATCH_EPILOG = """\
Each line of the file is one request:
{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}
Lines run only where other requests leave capacity. What has a result survives a restart of the router.
Ctrl-C ends `watch`, not the batch. See docs/BATCH.md.

examples:
  kvasir batch submit requests.jsonl --watch
  kvasir batch submit requests.jsonl --window 7d
  kvasir batch list
  kvasir batch watch batch_6af0…
  kvasir batch fetch batch_6af0… --to answers.jsonl"""
