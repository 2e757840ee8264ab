{{/* Name of everything in the release, and of the deployment in its spec: at most 40 characters. */}}
{{- define "kvasir.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" -}}
{{- if gt (len $full) 40 -}}
{{- printf "%s-%s" ($full | trunc 33 | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "suffix" "…"): a name of the release that fits into 63 characters, and stays apart from others. */}}
{{- define "kvasir.name" -}}
{{- $name := printf "%s-%s" (include "kvasir.fullname" .root) .suffix -}}
{{- if gt (len $name) 63 -}}
{{- printf "%s-%s" ($name | trunc 54 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "component" "…"): what selects the pods of a component. */}}
{{- define "kvasir.selector" -}}
kvasir.dev/deployment: {{ include "kvasir.fullname" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* (dict "root" $ "component" "…"): labels of an object, and of pods. */}}
{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/name: kvasir
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvasir
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "image" map): a digest where one is known, else a tag. */}}
{{- define "kvasir.image" -}}
{{- $registry := default .root.Values.images.registry .image.registry -}}
{{- $repository := ternary (printf "%s/%s" $registry .image.repository) .image.repository (not (empty $registry)) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- $tag := default .root.Chart.AppVersion .image.tag -}}
{{- if eq $tag "latest" -}}
{{- fail (printf "images: %s:latest is whatever was built last; name a version or a digest" $repository) -}}
{{- end -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}
{{- end -}}

{{/* What every pod of the chart has, whichever its component. */}}
{{- define "kvasir.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . }}
{{- end }}
securityContext:
{{ toYaml .Values.podSecurityContext | indent 2 }}
{{- end -}}

{{/* (dict "root" $ "own" map): where pods of a component run; its own settings. */}}
{{- define "kvasir.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}

{{/* Name of the Secret of one kind: an existing one, or ours. (dict "root" $ "kind" "session" "existing" "…") */}}
{{- define "kvasir.secretName" -}}
{{- default (include "kvasir.name" (dict "root" .root "suffix" .kind)) .existing -}}
{{- end -}}

{{- define "kvasir.secret.session" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "session" "existing" .Values.secrets.session.existingSecret) -}}
{{- end -}}
{{- define "kvasir.secret.cache" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "cache" "existing" .Values.secrets.cache.existingSecret) -}}
{{- end -}}
{{- define "kvasir.secret.ray" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "ray" "existing" .Values.secrets.ray.existingSecret) -}}
{{- end -}}
{{- define "kvasir.secret.apiKeys" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "api-keys" "existing" .Values.secrets.apiKeys.existingSecret) -}}
{{- end -}}
{{- define "kvasir.secret.redis" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "redis" "existing" .Values.redis.existingSecret) -}}
{{- end -}}
{{- define "kvasir.secret.tls" -}}
{{- include "kvasir.secretName" (dict "root" . "kind" "tls" "existing" .Values.certificates.existingSecret) -}}
{{- end -}}

{{/* Name of the Secret with an API key in clear, for the test and for Prometheus; empty where there is none. */}}
{{- define "kvasir.secret.operatorKey" -}}
{{- if .Values.secrets.operatorKey.existingSecret -}}
{{- .Values.secrets.operatorKey.existingSecret -}}
{{- else if not .Values.secrets.apiKeys.existingSecret -}}
{{- include "kvasir.name" (dict "root" . "suffix" "operator-key") -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" $ "name" secret "key" "…" "prefix" "…"): what the Secret holds already, else something random;
     base64. Rendering without a cluster finds nothing. */}}
{{- define "kvasir.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if and $found $found.data (hasKey $found.data .key) -}}
{{- index $found.data .key -}}
{{- else -}}
{{- printf "%s%s" (default "" .prefix) (randAlphaNum 43) | b64enc -}}
{{- end -}}
{{- end -}}

{{/* Whether there is a Redis, ours or another: "true" or empty. */}}
{{- define "kvasir.redis" -}}
{{- if or .Values.redis.bundled .Values.redis.url -}}true{{- end -}}
{{- end -}}

{{/* Address of that Redis as a URL without a database. */}}
{{- define "kvasir.redis.url" -}}
{{- if .Values.redis.bundled -}}
{{- printf "%s://%s:6379" (ternary "rediss" "redis" (not (empty .Values.redis.tlsSecret))) (include "kvasir.name" (dict "root" . "suffix" "redis")) -}}
{{- else -}}
{{- .Values.redis.url -}}
{{- end -}}
{{- end -}}

{{/* The Secret with ca.crt, the authority of that Redis' certificate. Empty: those of the system, or no TLS. */}}
{{- define "kvasir.redis.ca" -}}
{{- ternary .Values.redis.tlsSecret .Values.redis.caSecret .Values.redis.bundled -}}
{{- end -}}

{{/* Whether that Redis wants a password: "true" or empty. */}}
{{- define "kvasir.redis.password" -}}
{{- if or .Values.redis.bundled .Values.redis.existingSecret -}}true{{- end -}}
{{- end -}}

{{/* Address of the gateway within the cluster. */}}
{{- define "kvasir.gateway.url" -}}
{{- printf "%s://%s.%s.svc:%v" (ternary "https" "http" (not (empty .Values.router.tls.secretName))) (include "kvasir.name" (dict "root" . "suffix" "router")) .Release.Namespace .Values.router.service.port -}}
{{- end -}}

{{/* The model that `helm test` asks for: the first that generates; empty if none does. */}}
{{- define "kvasir.test.model" -}}
{{- $spec := include "kvasir.config" . | fromJson }}
{{- $model := dict }}
{{- range $candidate := prepend (default list $spec.models) (default dict $spec.model) }}
{{- $called := default (dig "served_name" "" $candidate) $candidate.name | default (dig "source" "kvasir-tiny" $candidate | trimSuffix "/" | base) }}
{{- range $pool := $spec.pools }}
{{- if and (ne $pool.role "embed") (or (eq (dig "model" "" $pool) $called) (and (not (hasKey $pool "model")) (not (hasKey $candidate "name")))) }}
{{- if not $model.name }}
{{- $_ := set $model "name" $called }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- default "" $model.name -}}
{{- end }}
