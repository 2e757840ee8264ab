{{/* What every process that talks to this Ray has in its environment. The token is read from a file. */}}
{{- define "kvasir.ray.env" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN_PATH
  value: /etc/kvasir/ray/auth_token
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end -}}

{{/* Labels of Ray's pods. Their `name` is KubeRay's, whose Service of the head selects by it. */}}
{{- define "kvasir.ray.labels" -}}
{{- omit (include "kvasir.labels" . | fromYaml) "app.kubernetes.io/name" | toYaml -}}
{{- end -}}

{{/* Where a worker's pod runs. A label that the pod does not have is an empty variable. */}}
{{- define "kvasir.ray.place" -}}
{{- $labels := dig "discovery" "kubernetes" "node_labels" (dict) . -}}
- name: KVASIR_NODE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: KVASIR_ZONE
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ default "topology.kubernetes.io/zone" $labels.zone }}']
{{- with $labels.rack }}
- name: KVASIR_RACK
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ . }}']
{{- end }}
- name: KVASIR_NVLINK_DOMAIN
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['{{ default "nvidia.com/gpu.clique" $labels.nvlink_domain }}']
{{- end -}}

{{- define "kvasir.ray.mounts" -}}
- name: config
  mountPath: /etc/kvasir/config
  readOnly: true
- name: session
  mountPath: /etc/kvasir/session
  readOnly: true
- name: ray
  mountPath: /etc/kvasir/ray
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- end -}}

{{/* (dict "root" $ "tmp" size "shm" size) */}}
{{- define "kvasir.ray.volumes" -}}
- name: config
  configMap:
    name: {{ include "kvasir.name" (dict "root" .root "suffix" "config") }}
- name: session
  secret:
    secretName: {{ include "kvasir.secret.session" .root }}
    defaultMode: 0440
- name: ray
  secret:
    secretName: {{ include "kvasir.secret.ray" .root }}
    defaultMode: 0440
    items:
      - key: auth_token
        path: auth_token
- name: tmp
  emptyDir:
    sizeLimit: {{ .tmp }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shm }}
{{- end -}}

{{/* What is wished for the pods of each pool, for the control process: which template they are of, and how many
     there may be. The digest is of what a running pod has been given: labels of the chart's version are not. JSON. */}}
{{- define "kvasir.ray.pods" -}}
{{- $root := . -}}
{{- $spec := include "kvasir.config" . | fromJson -}}
{{- $pods := dict -}}
{{- range $pool := $spec.pools -}}
{{- $own := include "kvasir.pool" (dict "root" $root "pool" $pool) | fromJson -}}
{{- $template := include "kvasir.ray.worker" (dict "root" $root "pool" $pool "own" $own "spec" $spec) | fromYaml -}}
{{- $given := dict "pool" $pool.name "spec" $template.spec "cpus" $own.cpus "gpus" $own.gpus -}}
{{- if gt (include "kvasir.pool.nodes" (dict "pool" $pool) | int) 1 -}}
{{- $follower := include "kvasir.ray.follower" (dict "root" $root "pool" $pool "own" $own "spec" $spec) | fromYaml -}}
{{- $_ := set $given "follower" $follower.spec -}}
{{- end -}}
{{- $_ := set $given "labels" $own.podLabels -}}
{{- $_ := set $given "annotations" $own.podAnnotations -}}
{{- $most := ternary $own.maxReplicas $own.replicas $root.Values.ray.autoscaler.enabled | int -}}
{{- $_ := set $pods $pool.name (dict "template" (toJson $given | sha256sum | trunc 12) "pods" $most) -}}
{{- end -}}
{{- toJson $pods -}}
{{- end -}}

{{/* Pod template of a pool's group. (dict "root" $ "pool" entry "own" settings "spec" spec "template" its digest) */}}
{{- define "kvasir.ray.worker" -}}
{{- $labels := dict "root" .root "component" "worker" -}}
{{- $own := .own -}}
{{- $drain := int (ceil (dig "worker" "drain_s" 20.0 .spec)) -}}
{{- $resources := deepCopy $own.resources -}}
{{- $devices := dict -}}
{{- if gt (int $own.gpus) 0 -}}
{{- $_ := set $devices $own.gpuResource (int $own.gpus) -}}
{{- end -}}
{{- if $own.rdma.resource -}}
{{- $_ := set $devices $own.rdma.resource (int $own.rdma.count) -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (deepCopy $devices) (default dict (get $resources $kind))) -}}
{{- end -}}
{{- $security := deepCopy .root.Values.containerSecurityContext -}}
{{- if $own.rdma.lockMemory -}}
{{- $_ := set $security "capabilities" (dict "drop" (list "ALL") "add" (list "IPC_LOCK")) -}}
{{- end -}}
metadata:
  labels:
    {{- include "kvasir.ray.labels" $labels | nindent 4 }}
    kvasir.dev/pool: {{ .pool.name }}
    kvasir.dev/rank: "0"
    {{- with $own.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kvasir.dev/template: {{ default "" .template | quote }}
    {{- with $own.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kvasir.pod" .root | nindent 2 }}
  {{- include "kvasir.placement" $own | nindent 2 }}
  serviceAccountName: {{ include "kvasir.name" (dict "root" .root "suffix" "worker") }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $drain 40 }}
  # A pod that has ended is made anew by KubeRay, and from the template of that time.
  restartPolicy: Never
  topologySpreadConstraints:
    {{- if $own.topologySpreadConstraints }}
    {{- toYaml $own.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "kvasir.selector" $labels | nindent 10 }}
          kvasir.dev/pool: {{ .pool.name }}
    {{- end }}
  {{- include "kvasir.model.init" (dict "root" .root "image" (mergeOverwrite (deepCopy .root.Values.images.worker) $own.image)) | nindent 2 }}
  containers:
    - name: worker
      image: {{ include "kvasir.image" (dict "root" .root "image" (mergeOverwrite (deepCopy .root.Values.images.worker) $own.image)) }}
      imagePullPolicy: {{ .root.Values.images.worker.pullPolicy }}
      command:
        - python
        - -m
        - kvasir_platform.apps.worker_pod
      args:
        - --grace-s={{ add $drain 10 }}
      env:
        {{- include "kvasir.env" .root | nindent 8 }}
        {{- include "kvasir.ray.env" .root | nindent 8 }}
        - name: KVASIR_POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: KVASIR_START_NOTICE
          value: /tmp/start-notice
        {{- include "kvasir.ray.place" .spec | nindent 8 }}
        {{- with $own.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: session
          containerPort: {{ .spec.worker.port }}
        - name: health
          containerPort: {{ .spec.worker.health_port }}
        - name: raylet
          containerPort: 6381
      startupProbe:
        # What it prints is an event of the pod: why the engine did not start.
        exec:
          command:
            - python
            - -m
            - kvasir_platform.apps.worker_probe
            - --port={{ .spec.worker.health_port }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ mul $own.startupMinutes 12 }}
      readinessProbe:
        grpc:
          port: {{ .spec.worker.health_port }}
        periodSeconds: 3
        timeoutSeconds: 3
        failureThreshold: 2
      livenessProbe:
        # Ray Serve watches the engine; this is for Ray's own part of the pod.
        tcpSocket:
          port: raylet
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      securityContext:
        {{- toYaml $security | nindent 8 }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "kvasir.ray.mounts" .root | nindent 8 }}
        - name: tls
          mountPath: /etc/kvasir/tls
          readOnly: true
        {{- include "kvasir.redis.mounts" .root | nindent 8 }}
        {{- include "kvasir.model.mounts" .root | nindent 8 }}
        {{- if .root.Values.compileCache.enabled }}
        - name: compiled
          mountPath: /compiled
        {{- end }}
        {{- with dig "tiers" "disk" "path" "" .spec }}
        - name: kv
          mountPath: {{ . }}
        {{- end }}
        {{- with $own.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "kvasir.ray.volumes" (dict "root" .root "tmp" $own.tmpSize "shm" $own.sharedMemory) | nindent 4 }}
    - name: tls
      {{- include "kvasir.tls.volume" (dict "root" .root "role" (printf "worker-%s" .pool.name) "file" (printf "worker-%s.pem" .pool.name)) | nindent 6 }}
    {{- include "kvasir.redis.volumes" .root | nindent 4 }}
    {{- include "kvasir.model.volumes" .root | nindent 4 }}
    {{- if .root.Values.compileCache.enabled }}
    - name: compiled
      persistentVolumeClaim:
        claimName: {{ include "kvasir.compiled.claim" .root }}
    {{- end }}
    {{- if dig "tiers" "disk" "path" "" .spec }}
    - name: kv
      {{- if $own.diskTier.storageClass }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ $own.diskTier.storageClass }}
            resources:
              requests:
                storage: {{ $own.diskTier.size }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $own.diskTier.size }}
      {{- end }}
    {{- end }}
    {{- with $own.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
