{{- define "kvasir.network.head" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "kvasir.name" (dict "root" .root "suffix" .component) }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "kvasir.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "kvasir.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{- define "kvasir.network.dns" -}}
# Names are looked up in the cluster's own name server.
- to:
    - namespaceSelector: {}
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

{{- define "kvasir.network.apiServer" -}}
- to:
    {{- range .Values.networkPolicy.apiServer.cidrs }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - port: {{ . }}
      protocol: TCP
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
- to:
    {{- range .Values.networkPolicy.redis.cidrs }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    - port: {{ regexFind "[0-9]+$" .Values.redis.url | default "6379" | int }}
      protocol: TCP
{{- end }}
{{- end -}}

{{- define "kvasir.network.models" -}}
{{- if not .Values.modelCache.enabled }}
# Weights are fetched by the pods themselves.
- to:
    {{- range .Values.networkPolicy.models.cidrs }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  ports:
    - port: 443
      protocol: TCP
{{- end }}
{{- end -}}
