{{/* (dict "root" $ "component" "…" "annotations" text of them or none): a policy up to its rules. */}}
{{- define "kvasir.network.head" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "kvasir.name" (dict "root" .root "suffix" .component) }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "kvasir.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
spec:
  podSelector:
    matchLabels:
      {{- include "kvasir.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{- define "kvasir.network.dns" -}}
# Names are looked up in the cluster's own name server.
- to:
    - namespaceSelector:
        matchLabels:
          {{- toYaml .Values.networkPolicy.dns.namespaceLabels | nindent 10 }}
      podSelector:
        matchLabels:
          {{- toYaml .Values.networkPolicy.dns.podLabels | nindent 10 }}
  ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{- define "kvasir.network.pods" -}}
- podSelector:
    matchLabels:
      {{- include "kvasir.selector" . | nindent 6 }}
{{- end -}}

{{/* Beside the given addresses those that the cluster itself has for its API server, which may be public ones. */}}
{{- define "kvasir.network.apiServer" -}}
{{- $cidrs := .Values.networkPolicy.apiServer.cidrs }}
{{- range (lookup "v1" "Endpoints" "default" "kubernetes").subsets }}
{{- range .addresses }}
{{- $cidrs = append $cidrs (printf "%s/%d" .ip (ternary 128 32 (contains ":" .ip))) }}
{{- end }}
{{- end }}
{{- include "kvasir.network.blocks" (dict "cidrs" $cidrs "ports" .Values.networkPolicy.apiServer.ports) }}
{{- end -}}

{{/* (dict "cidrs" … "ports" …): one egress rule; none without an address, since a rule without one is for all. */}}
{{- define "kvasir.network.blocks" -}}
{{- if .cidrs }}
- to:
    {{- range uniq .cidrs }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    {{- range .ports }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
{{- end }}
{{- end -}}

{{- define "kvasir.network.redis" -}}
{{- if .Values.redis.bundled }}
- to:
    {{- include "kvasir.network.pods" (dict "root" . "component" "redis") | nindent 4 }}
  ports:
    - port: 6379
      protocol: TCP
{{- else if .Values.redis.url }}
{{- $port := regexFind "[0-9]+$" .Values.redis.url | default "6379" | int }}
{{- include "kvasir.network.blocks" (dict "cidrs" .Values.networkPolicy.redis.cidrs "ports" (list $port)) }}
{{- end }}
{{- end -}}

{{- define "kvasir.network.models" -}}
{{- if not .Values.modelCache.enabled }}
{{- include "kvasir.network.downloads" . }}
{{- end }}
{{- end -}}

{{- define "kvasir.network.downloads" -}}
{{- include "kvasir.network.blocks" (dict "cidrs" .Values.networkPolicy.models.cidrs "ports" (list 443)) }}
{{- end -}}
