{{/* Where processes may write, and who they are, in an image whose root file system cannot be written. */}}
{{- define "kvasir.env" -}}
- name: HOME
  value: /tmp
- name: USER
  value: kvasir
- name: HF_HOME
  value: /models
{{- if .Values.modelCache.enabled }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else if .Values.modelCache.tokenSecret }}
- name: HF_TOKEN_PATH
  value: /etc/kvasir/model-token/token
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "router"|"worker-POOL" "file" "…pem"): a folder with ca.pem and the role's own file, and
     no other role's. A pod waits until both are there. */}}
{{- define "kvasir.tls.volume" -}}
{{- if eq .root.Values.certificates.from "certManager" -}}
secret:
  secretName: {{ include "kvasir.name" (dict "root" .root "suffix" (printf "tls-%s" .role)) }}
  defaultMode: 0440
  items:
    - key: ca.crt
      path: ca.pem
    - key: tls-combined.pem
      path: {{ .file }}
{{- else -}}
secret:
  secretName: {{ include "kvasir.secret.tls" .root }}
  defaultMode: 0440
  items:
    - key: ca.pem
      path: ca.pem
    - key: {{ .file }}
      path: {{ .file }}
{{- end -}}
{{- end -}}

{{- define "kvasir.redis.mounts" -}}
{{- if and (include "kvasir.redis.password" .) (or .Values.redis.limits .Values.redis.tier) }}
- name: redis
  mountPath: /etc/kvasir/redis
  readOnly: true
{{- end }}
{{- include "kvasir.redis.ca.mount" . }}
{{- end -}}

{{- define "kvasir.redis.ca.mount" -}}
{{- if include "kvasir.redis.ca" . }}
- name: redis-ca
  mountPath: /etc/kvasir/redis-ca
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvasir.redis.volumes" -}}
{{- if and (include "kvasir.redis.password" .) (or .Values.redis.limits .Values.redis.tier) }}
- name: redis
  secret:
    secretName: {{ include "kvasir.secret.redis" . }}
    defaultMode: 0440
    items:
      - key: password
        path: password
{{- end }}
{{- include "kvasir.redis.ca.volume" . }}
{{- end -}}

{{/* The certificate alone: the Secret of the bundled Redis has its key too. */}}
{{- define "kvasir.redis.ca.volume" -}}
{{- with include "kvasir.redis.ca" . }}
- name: redis-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- end -}}

{{/* Name of the file that says that the models of this spec have been fetched. */}}
{{- define "kvasir.model.mark" -}}
{{- include "kvasir.model.list" . | sha256sum | trunc 16 | printf ".fetched-%s" -}}
{{- end -}}

{{/* Source and revision of every model of the spec, and of every draft, as a JSON list of pairs in one. */}}
{{- define "kvasir.model.list" -}}
{{- $first := default dict .Values.config.model -}}
{{- $found := list (dig "source" "kvasir-tiny" $first) (dig "revision" "main" $first) -}}
{{- range .Values.config.models -}}
{{- $found = concat $found (list (dig "source" "kvasir-tiny" .) (dig "revision" "main" .)) -}}
{{- end -}}
{{- range .Values.config.pools -}}
{{- $draft := default dict (dig "engine" "speculative" dict .) -}}
{{- if $draft.model -}}
{{- $found = concat $found (list $draft.model (default "main" $draft.revision)) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "kvasir.model.claim" -}}
{{- default (include "kvasir.name" (dict "root" . "suffix" "models")) .Values.modelCache.existingClaim -}}
{{- end -}}

{{- define "kvasir.model.mounts" -}}
- name: models
  mountPath: /models
  {{- if .Values.modelCache.enabled }}
  readOnly: true
  {{- else if .Values.modelCache.tokenSecret }}
- name: model-token
  mountPath: /etc/kvasir/model-token
  readOnly: true
  {{- end }}
{{- end -}}

{{- define "kvasir.model.volumes" -}}
- name: models
  {{- if .Values.modelCache.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "kvasir.model.claim" . }}
    readOnly: true
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.size }}
  {{- if .Values.modelCache.tokenSecret }}
- name: model-token
  secret:
    secretName: {{ .Values.modelCache.tokenSecret }}
    defaultMode: 0440
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Waits until the shared folder holds all that the spec names. (dict "root" $ "image" map) */}}
{{- define "kvasir.model.init" -}}
{{- if and .root.Values.modelCache.enabled .root.Values.modelCache.fetch }}
initContainers:
  - name: models
    image: {{ include "kvasir.image" . }}
    imagePullPolicy: {{ .image.pullPolicy }}
    command:
      - sh
      - -c
      - until [ -e "/models/$0" ]; do echo "waiting for the models to be fetched"; sleep 5; done
      - {{ include "kvasir.model.mark" .root }}
    securityContext:
      {{- toYaml .root.Values.containerSecurityContext | nindent 6 }}
    resources:
      {{- toYaml .root.Values.helpers.resources | nindent 6 }}
    volumeMounts:
      - name: models
        mountPath: /models
        readOnly: true
{{- end }}
{{- end -}}

{{- define "kvasir.compiled.claim" -}}
{{- default (include "kvasir.name" (dict "root" . "suffix" "compiled")) .Values.compileCache.existingClaim -}}
{{- end -}}

{{/* Credentials for the S3 of batches. */}}
{{- define "kvasir.batches.env" -}}
{{- with .Values.batches.s3.credentialsSecret -}}
{{- $secret := . -}}
{{- range $name := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" "AWS_SESSION_TOKEN" }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $name }}
      {{- if eq $name "AWS_SESSION_TOKEN" }}
      optional: true
      {{- end }}
{{- end }}
{{- end -}}
{{- end -}}


{{- define "kvasir.batches.claim" -}}
{{- default (include "kvasir.name" (dict "root" . "suffix" "batches")) .Values.batches.existingClaim -}}
{{- end -}}
