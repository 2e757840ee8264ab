{{- define "kvasir.certify.pod" -}}
{{- $own := dict "root" . "component" "certify" -}}
metadata:
  labels:
    {{- include "kvasir.labels" $own | nindent 4 }}
spec:
  {{- include "kvasir.pod" . | nindent 2 }}
  {{- include "kvasir.placement" .Values.helpers | nindent 2 }}
  serviceAccountName: {{ include "kvasir.name" (dict "root" . "suffix" "certify") }}
  automountServiceAccountToken: true
  enableServiceLinks: false
  restartPolicy: OnFailure
  containers:
    - name: certify
      image: {{ include "kvasir.image" (dict "root" . "image" .Values.images.router) }}
      imagePullPolicy: {{ .Values.images.router.pullPolicy }}
      command:
        - python
        - -m
        - kvasir_platform.apps.certify
      args:
        - --deployment=/etc/kvasir/config/kvasir.yaml
        - --secret={{ include "kvasir.secret.tls" . }}
        - --authority={{ include "kvasir.name" (dict "root" . "suffix" "authority") }}
        - --life-h={{ .Values.certificates.generated.lifeHours }}
      env:
        - name: HOME
          value: /tmp
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- toYaml .Values.helpers.resources | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/kvasir/config
          readOnly: true
        - name: tmp
          mountPath: /tmp
  volumes:
    - name: config
      configMap:
        name: {{ include "kvasir.name" (dict "root" . "suffix" "config") }}
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
{{- end -}}
