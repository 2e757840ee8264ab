{{/* Pods that carry the further nodes of engines which are spread over several: a group of their own, beside the one
     whose pods have the first node, serve sessions and are found by routers. */}}

{{/* On how many pods an engine of the pool is. (dict "pool" entry of config.pools) */}}
{{- define "kvasir.pool.nodes" -}}
{{- int (dig "engine" "nodes" 1 .pool) -}}
{{- end -}}

{{/* Pod template of the group: the pool's, less what belongs to sessions. Takes what kvasir.ray.worker takes. */}}
{{- define "kvasir.ray.follower" -}}
{{- $without := list "session" "tls" "redis" "redis-ca" "kv" -}}
{{- $pod := include "kvasir.ray.worker" . | fromYaml -}}
{{- $_ := set $pod.metadata.labels "kvasir.dev/rank" "follower" -}}
{{- $volumes := list -}}
{{- range $pod.spec.volumes -}}
{{- if not (has .name $without) -}}{{- $volumes = append $volumes . -}}{{- end -}}
{{- end -}}
{{- $_ := set $pod.spec "volumes" $volumes -}}
{{- $container := first $pod.spec.containers -}}
{{- $mounts := list -}}
{{- range $container.volumeMounts -}}
{{- if not (has .name $without) -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}
{{- $_ := set $container "volumeMounts" $mounts -}}
{{- $ports := list -}}
{{- range $container.ports -}}
{{- if eq .name "raylet" -}}{{- $ports = append $ports . -}}{{- end -}}
{{- end -}}
{{- $_ := set $container "ports" $ports -}}
{{/* Whether its ranks work is seen at the first node; here it is whether Ray may place them. */}}
{{- $probe := dict "tcpSocket" (dict "port" "raylet") -}}
{{- $_ := set $container "startupProbe" (merge (dict "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 36) $probe) -}}
{{- $_ := set $container "readinessProbe" (merge (dict "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 2) $probe) -}}
{{- range $constraint := $pod.spec.topologySpreadConstraints -}}
{{- if not $.own.topologySpreadConstraints -}}
{{- $_ := set $constraint.labelSelector.matchLabels "kvasir.dev/rank" "follower" -}}
{{- end -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end -}}

{{/* The group. (dict "root" $ "pool" entry "own" settings "spec" spec "template" digest) */}}
{{- define "kvasir.ray.followers" -}}
{{- $others := sub (include "kvasir.pool.nodes" . | int) 1 -}}
groupName: {{ .pool.name }}-followers
replicas: {{ mul .own.replicas $others }}
minReplicas: {{ mul .own.minReplicas $others }}
maxReplicas: {{ mul .own.maxReplicas $others }}
rayStartParams:
  num-cpus: {{ .own.cpus | quote }}
  num-gpus: {{ .own.gpus | quote }}
  resources: {{ printf `"{\"kvasir-follower-%s\": 1, \"kvasir-template-%s\": 1, \"kvasir-revision\": %d}"` .pool.name .template .root.Release.Revision | squote }}
  object-store-memory: "83886080"
  node-manager-port: "6381"
template:
  {{- include "kvasir.ray.follower" . | nindent 2 }}
{{- end -}}
