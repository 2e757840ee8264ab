{{/* The deployment spec as processes read it: what the user wrote, and what follows from the cluster. What the
     chart decides cannot be set to something else. */}}
{{- define "kvasir.config" -}}
{{- $user := deepCopy .Values.config -}}
{{- $gateway := dict "api_keys_dir" "/etc/kvasir/api-keys" "host" (include "kvasir.anyAddress" .) -}}
{{- if .Values.router.tls.secretName -}}
{{- $tls := dict "cert_file" "/etc/kvasir/gateway-tls/tls.crt" "key_file" "/etc/kvasir/gateway-tls/tls.key" -}}
{{- $_ := set $gateway "tls" $tls -}}
{{- end -}}
{{- if .Values.batches.enabled -}}
{{- $_ := set $gateway "batches" (dict "storage" "/batches") -}}
{{- end -}}
{{- if .Values.router.console.enabled -}}
{{- $_ := set $gateway "console" (dict "port" 8001 "host" (include "kvasir.anyAddress" .)) -}}
{{- end -}}
{{- $worker := dict "host" "pod" "session_token_file" "/etc/kvasir/session/token" -}}
{{- if .Values.compileCache.enabled -}}
{{- $_ := set $worker "compile_cache_dir" "/compiled" -}}
{{- end -}}
{{- $ours := dict
      "version" "kvasir/v1"
      "name" (include "kvasir.fullname" .)
      "gateway" $gateway
      "worker" $worker
      "transfer" (dict "host" "pod")
      "discovery" (dict "kind" "kubernetes" "kubernetes" (dict "port" "session"))
      "tls" (dict "mode" "files" "directory" "/etc/kvasir/tls")
      "tenancy" (dict "cache_secret_file" "/etc/kvasir/cache/secret") -}}
{{- if and (include "kvasir.redis" .) (or .Values.redis.limits .Values.redis.tier) -}}
{{- $server := dict -}}
{{- if include "kvasir.redis.password" . -}}
{{- $_ := set $server "password_file" "/etc/kvasir/redis/password" -}}
{{- end -}}
{{- with .Values.redis.username -}}
{{- $_ := set $server "username" . -}}
{{- end -}}
{{- if include "kvasir.redis.ca" . -}}
{{- $_ := set $server "ca_file" "/etc/kvasir/redis-ca/ca.crt" -}}
{{- end -}}
{{- $url := include "kvasir.redis.url" . -}}
{{- if .Values.redis.limits -}}
{{- $own := dict "url" (printf "%s/1" $url) "namespace" (include "kvasir.fullname" .) -}}
{{- $_ := set $ours.tenancy "redis" (merge $own (deepCopy $server)) -}}
{{- end -}}
{{- if .Values.redis.tier -}}
{{- $own := dict "url" (printf "%s/2" $url) -}}
{{- $_ := set $ours "tiers" (dict "redis" (merge $own (deepCopy $server))) -}}
{{- end -}}
{{- end -}}
{{- if .Values.router.cells.enabled -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq (include "kvasir.anyAddress" .) "::") -}}
{{- $_ := set $ours "regions" (dict "listen" (printf "%s:7443" $any)) -}}
{{- end -}}
{{- include "kvasir.config.agree" (dict "path" "config" "user" $user "ours" $ours) -}}
{{- $ports := dict "gateway" (dict "port" 8000) "worker" (dict "port" 7001 "health_port" 7002) -}}
{{- $spec := mergeOverwrite $ports $user $ours -}}
{{- include "kvasir.config.check" (dict "root" . "spec" $spec) -}}
{{- toJson $spec -}}
{{- end -}}

{{/* What binds to every address of a pod, in the family that routers dial. */}}
{{- define "kvasir.anyAddress" -}}
{{- $family := dig "discovery" "kubernetes" "address_family" "ipv4" .Values.config -}}
{{- ternary "::" "0.0.0.0" (eq $family "ipv6") -}}
{{- end -}}

{{/* Fails where the user set something that the chart decides, and to something else. */}}
{{- define "kvasir.config.agree" -}}
{{- range $field, $ours := .ours -}}
{{- if hasKey $.user $field -}}
{{- $path := printf "%s.%s" $.path $field -}}
{{- $theirs := get $.user $field -}}
{{- if kindIs "map" $ours -}}
{{- if kindIs "map" $theirs -}}
{{- include "kvasir.config.agree" (dict "path" $path "user" $theirs "ours" $ours) -}}
{{- end -}}
{{- else if ne (toJson $ours) (toJson $theirs) -}}
{{- fail (printf "%s is %s, and in a cluster the chart sets it to %s: remove it" $path (toJson $theirs) (toJson $ours)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails for what the schema cannot refuse. (dict "root" $ "spec" spec) */}}
{{- define "kvasir.config.check" -}}
{{- $values := .root.Values -}}
{{- $gateway := .spec.gateway -}}
{{- range $field := list "api_keys_file" "api_keys_env" -}}
{{- if hasKey $gateway $field -}}
{{- fail (printf "config.gateway.%s: in a cluster API keys come from a Secret; remove it, and name the Secret in secrets.apiKeys.existingSecret" $field) -}}
{{- end -}}
{{- end -}}
{{- range $field := list "ca_file" "cert_file" "key_file" -}}
{{- if hasKey $.spec.tls $field -}}
{{- fail (printf "config.tls.%s: in a cluster certificates come from Secrets; remove it, and see certificates" $field) -}}
{{- end -}}
{{- end -}}
{{- if or (dig "ray" "head_redis_url" "" .spec) (dig "ray" "head_redis_ca_file" "" .spec) -}}
{{- fail "config.ray.head_redis_url: in a cluster KubeRay tells Ray's head where its state is; remove it, and see redis.ray" -}}
{{- end -}}
{{- if and (not $values.router.tls.secretName) (dig "tls" "cert_file" "" $gateway) -}}
{{- fail "config.gateway.tls: certificates come from a Secret; remove it, and name the Secret in router.tls.secretName" -}}
{{- end -}}
{{- if and (dig "tls" "client_ca_file" "" $gateway) -}}
{{- fail "config.gateway.tls.client_ca_file: the kubelet has no certificate, so that no probe would pass; ask for client certificates at the Ingress or Gateway" -}}
{{- end -}}
{{- $names := list -}}
{{- range .spec.pools -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $name, $_ := $values.pools -}}
{{- if not (has $name $names) -}}
{{- fail (printf "pools.%s: config.pools has no pool of that name; it has %s" $name (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- range $pool := .spec.pools -}}
{{- $own := include "kvasir.pool" (dict "root" $.root "pool" $pool) | fromJson -}}
{{- include "kvasir.config.check.scaling" (dict "root" $.root "spec" $.spec "pool" $pool "own" $own) -}}
{{- include "kvasir.config.check.transfer" (dict "spec" $.spec "pool" $pool "own" $own) -}}
{{- $image := mergeOverwrite (deepCopy $values.images.worker) (default dict $own.image) -}}
{{- if and (hasSuffix "-cuda" $image.tag) (eq (int $own.gpus) 0) (ne (dig "engine" "kind" "vllm" $pool) "sim") -}}
{{- fail (printf "config.pools: %s has no GPU, and its image %s has vLLM's build for GPUs: name its GPU, as in `gpu: H100`, or set gpus" $pool.name $image.tag) -}}
{{- end -}}
{{- if lt (int $own.maxReplicas) (int $own.replicas) -}}
{{- fail (printf "pools.%s.maxReplicas: %d is less than config.pools' replicas %d" $pool.name (int $own.maxReplicas) (int $own.replicas)) -}}
{{- end -}}
{{- $further := printf "%s-followers" $pool.name -}}
{{- if and (gt (include "kvasir.pool.nodes" (dict "pool" $pool) | int) 1) (has $further $names) -}}
{{- fail (printf "config.pools: pods of %s's further nodes are called %s, as another pool is; rename that" $pool.name $further) -}}
{{- end -}}
{{- end -}}
{{- if and $values.router.autoscaling.enabled $values.router.keda.enabled -}}
{{- fail "router.autoscaling and router.keda: routers have one owner of their number; disable one" -}}
{{- end -}}
{{- $policy := $values.networkPolicy -}}
{{- $here := or (not $values.modelCache.enabled) $values.modelCache.fetch -}}
{{- $other := and (not $values.modelCache.enabled) $policy.router.egress $policy.worker.egress -}}
{{- if and $policy.enabled $here (not $policy.models.cidrs) (not $other) -}}
{{- range $number, $source := include "kvasir.model.list" .root | fromJsonArray -}}
{{- if not (or (mod $number 2) (hasPrefix "/" $source) (eq "kvasir-tiny" $source)) -}}
{{- fail (printf "networkPolicy.models.cidrs: %s is downloaded, and pods may reach no address outside the cluster; set it to the addresses of your mirror or object storage, or to [0.0.0.0/0, \"::/0\"] for Hugging Face, whose addresses change" $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $s3 := hasPrefix "s3://" (dig "batches" "storage" "" $gateway | toString) -}}
{{- if and $s3 $policy.enabled (not $policy.router.egress) -}}
{{- fail "networkPolicy.router.egress: config.gateway.batches.storage is in S3, and routers may reach no address outside the cluster; add a rule for its addresses and port" -}}
{{- end -}}
{{- if and $values.batches.s3.credentialsSecret (not $s3) -}}
{{- fail "batches.s3.credentialsSecret: files and batches are not in S3; set config.gateway.batches.storage to s3://BUCKET/PREFIX, or remove it" -}}
{{- end -}}
{{- if and $values.redis.bundled $values.redis.url -}}
{{- fail "redis.bundled and redis.url: use one or the other" -}}
{{- end -}}
{{- if and $values.redis.tlsSecret (not $values.redis.bundled) -}}
{{- fail "redis.tlsSecret: it is the certificate of the bundled Redis; for another one, set redis.url to rediss://host:port, and redis.caSecret" -}}
{{- end -}}
{{- if and $values.redis.caSecret (not (hasPrefix "rediss://" $values.redis.url)) -}}
{{- fail "redis.caSecret: redis.url does not use TLS; use rediss://, or remove redis.caSecret" -}}
{{- end -}}
{{- if and (not (include "kvasir.redis" .root)) (or $values.redis.limits $values.redis.tier $values.redis.ray) -}}
{{- fail "redis: limits, tier and ray need a Redis; set redis.bundled or redis.url, or switch them off" -}}
{{- end -}}
{{- if and (eq $values.certificates.from "existingSecret") (not $values.certificates.existingSecret) -}}
{{- fail "certificates.existingSecret: name the Secret with ca.pem, router.pem and a worker-POOL.pem for each pool" -}}
{{- end -}}
{{- end -}}

{{/* The same of a pool's sizes, where it has bounds for them.
     (dict "root" $ "spec" spec "pool" entry of config.pools "own" its settings) */}}
{{- define "kvasir.config.check.scaling" -}}
{{- $name := .pool.name -}}
{{- $own := .own -}}
{{- with .pool.scaling -}}
{{- $least := int (dig "min" 1 .) -}}
{{- $most := int .max -}}
{{- $begins := int $own.replicas -}}
{{- if or (lt $begins $least) (gt $begins $most) -}}
{{- fail (printf "config.pools: %s begins with replicas %d, and its scaling keeps it between %d and %d; begin within that" $name $begins $least $most) -}}
{{- end -}}
{{- if lt (int $own.maxReplicas) $most -}}
{{- fail (printf "pools.%s.maxReplicas: %d is less than scaling.max %d in config.pools, so that replicas would find no pods; remove it, or make it at least that" $name (int $own.maxReplicas) $most) -}}
{{- end -}}
{{- if gt (int $own.minReplicas) $most -}}
{{- fail (printf "pools.%s.minReplicas: %d is more than scaling.max %d in config.pools, so that some of these pods would never have a replica; remove it, or make it at most that" $name (int $own.minReplicas) $most) -}}
{{- end -}}
{{- if and (include "kvasir.scales" $.spec) (not $.root.Values.ray.autoscaler.enabled) (gt $most $begins) -}}
{{- fail (printf "ray.autoscaler.enabled: without it nobody makes pods for %s beyond its %d, and its scaling.max in config.pools is %d; enable it, make replicas %d from the beginning, or set config.scaling.mode to manual" $name $begins $most $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether the planner has anything to size: "true" or empty. Takes the spec. */}}
{{- define "kvasir.scales" -}}
{{- if ne (dig "scaling" "mode" "auto" .) "manual" -}}
{{- $bound := list -}}
{{- range .pools -}}
{{- if .scaling -}}{{- $bound = append $bound .name -}}{{- end -}}
{{- end -}}
{{- if $bound -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails where UCX would give the memory of engines to whoever reaches its ports over TCP. (dict "spec" … "pool" … "own" …) */}}
{{- define "kvasir.config.check.transfer" -}}
{{- $kind := dig "transfer" "kind" "auto" .spec -}}
{{- $accepted := dig "transfer" "nixl" "unauthenticated_tcp" false .spec -}}
{{- $moves := and (ne (dig "disaggregation" "always" .spec) "never") (has .pool.role (list "prefill" "decode")) -}}
{{- if and $moves (ne $kind "nccl") (not $accepted) -}}
{{- $accept := "or, where nobody else reaches the network of the pods, accept it with config.transfer.nixl.unauthenticated_tcp: true" -}}
{{- if and (eq $kind "nixl") (not .own.rdma.resource) -}}
{{- fail (printf "config.transfer.kind: nixl between pods needs RDMA devices, and pools.%s.rdma.resource names none: over TCP, UCX lets whoever reaches its port read and write the memory of the engine; set auto or nccl, whose ports ask for tickets, name the resource, %s" .pool.name $accept) -}}
{{- end -}}
{{- range .own.env -}}
{{- if and $.own.rdma.resource (eq .name "UCX_TLS") (regexMatch "(^|,) *(tcp|all) *(,|$)" (dig "value" "" .)) -}}
{{- fail (printf "pools.%s.env: UCX_TLS is %s, which allows TCP: whoever reaches UCX's port could read and write the memory of the engine; remove the variable or tcp from it, %s" $.pool.name .value $accept) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Everything about one pool that pods need: settings of all pools, of this one, and what follows from its spec.
     (dict "root" $ "pool" entry of config.pools); JSON. */}}
{{- define "kvasir.pool" -}}
{{- $own := mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy (default dict (get .root.Values.pools .pool.name))) -}}
{{- $replicas := int (dig "replicas" 1 .pool) -}}
{{- $_ := set $own "replicas" $replicas -}}
{{- $least := $replicas -}}
{{- $most := max 1 $replicas -}}
{{- with .pool.scaling -}}
{{- $least = int (dig "min" 1 .) -}}
{{- $most = int .max -}}
{{- end -}}
{{- if not $own.maxReplicas -}}
{{- $_ := set $own "maxReplicas" $most -}}
{{- end -}}
{{/* 0 is a number here, and no default. */}}
{{- if kindIs "invalid" $own.minReplicas -}}
{{- $_ := set $own "minReplicas" $least -}}
{{- end -}}
{{- if kindIs "invalid" $own.minAvailable -}}
{{- $_ := set $own "minAvailable" (max 1 (sub $least 1)) -}}
{{- end -}}
{{- $_ := set $own "cpus" (int (ceil (dig "cpus" 0.5 .pool))) -}}
{{- $_ := set $own "gpus" (include "kvasir.pool.gpus" . | int) -}}
{{- toJson $own -}}
{{- end -}}

{{/* GPUs of a replica in each of its pods, by the same rule as the processes: `auto` is one for each rank where the
     pool names its GPU, and none otherwise. (dict "pool" entry of config.pools) */}}
{{- define "kvasir.pool.gpus" -}}
{{- $gpus := dig "gpus" "auto" .pool -}}
{{- $engine := default dict .pool.engine -}}
{{- if ne (toString $gpus) "auto" -}}
{{- int (ceil $gpus) -}}
{{- else if and .pool.gpu (ne (dig "kind" "vllm" $engine) "sim") -}}
{{- $stages := mul (int (dig "tensor_parallel_size" 1 $engine)) (int (dig "pipeline_parallel_size" 1 $engine)) -}}
{{- div (mul $stages (int (dig "data_parallel_size" 1 $engine))) (include "kvasir.pool.nodes" . | int) -}}
{{- else -}}
0
{{- end -}}
{{- end -}}
