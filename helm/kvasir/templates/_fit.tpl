{{/* Whether any pool is on GPUs: "true" or empty. Takes the spec. */}}
{{- define "kvasir.fit.wanted" -}}
{{- $on := list -}}
{{- range .pools -}}
{{- $gpus := include "kvasir.pool.gpus" (dict "pool" .) | int -}}
{{- if and $gpus (eq "vllm" (dig "engine" "kind" "vllm" .)) -}}{{- $on = append $on .name -}}{{- end -}}
{{- end -}}
{{- if $on -}}true{{- end -}}
{{- end -}}

{{/* The GPUs that a pool can come to, by the label of their nodes, where its spec names none; a JSON list.
     (dict "root" $ "pool" entry of config.pools) */}}
{{- define "kvasir.fit.gpus" -}}
{{- $label := "nvidia.com/gpu.product" -}}
{{- $own := include "kvasir.pool" . | fromJson -}}
{{- $selector := default dict $own.nodeSelector -}}
{{- $found := list -}}
{{- if and (gt (int $own.gpus) 0) (not .pool.gpu) (eq $own.gpuResource "nvidia.com/gpu") -}}
{{- if hasKey $selector $label -}}
{{- $found = append $found (get $selector $label) -}}
{{- else -}}
{{- range dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" list (default dict $own.affinity) -}}
{{- range .matchExpressions -}}
{{- if and (eq .key $label) (eq .operator "In") -}}
{{- $found = concat $found .values -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (not $found) .root.Values.fit.nodes -}}
{{- range $node := (lookup "v1" "Node" "" "").items -}}
{{- $labels := default dict $node.metadata.labels -}}
{{- $other := dict -}}
{{- range $key, $value := $selector -}}
{{- if ne (get $labels $key) $value -}}{{- $_ := set $other $key $value -}}{{- end -}}
{{- end -}}
{{- if and (hasKey $labels $label) (not $other) -}}
{{- $found = append $found (get $labels $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (uniq $found) -}}
{{- end -}}

{{/* Whether the Job can have a claim beside the pods that use it: "true" or empty. A claim that one node has alone is
     free before the first installation only. (dict "root" $ "claim" name "modes" known ones "made" by this release) */}}
{{- define "kvasir.fit.mountable" -}}
{{- $found := lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace .claim -}}
{{- $modes := dig "spec" "accessModes" .modes (default dict $found) -}}
{{- $many := or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes) -}}
{{- if and (or $found (not .made)) (or $many (and $found .root.Release.IsInstall)) -}}true{{- end -}}
{{- end -}}

{{/* Whether the Job reads the claim of models: "true" or empty. What is downloaded is read where it is downloaded from. */}}
{{- define "kvasir.fit.claim" -}}
{{- $cache := .Values.modelCache -}}
{{- if $cache.enabled -}}
{{- $held := not $cache.fetch -}}
{{- range include "kvasir.model.list" . | fromJsonArray -}}
{{- $held = or $held (hasPrefix "/models/" .) -}}
{{- end -}}
{{- if $held -}}
{{- include "kvasir.fit.mountable" (dict "root" . "claim" (include "kvasir.model.claim" .) "modes" $cache.accessModes "made" (not $cache.existingClaim)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Volumes in which workers, or else routers, find models by their path, as the Job mounts them; a JSON list of
     `volume` and `mount`. */}}
{{- define "kvasir.fit.volumes" -}}
{{- $root := . -}}
{{- $owners := list -}}
{{- range (include "kvasir.config" . | fromJson).pools -}}
{{- $owners = append $owners (include "kvasir.pool" (dict "root" $root "pool" .) | fromJson) -}}
{{- end -}}
{{- $owners = append $owners .Values.router -}}
{{- $found := list -}}
{{- $taken := dict -}}
{{- range $source := include "kvasir.model.list" . | fromJsonArray -}}
{{- range $owner := $owners -}}
{{- range $mount := $owner.volumeMounts -}}
{{- $path := trimSuffix "/" $mount.mountPath -}}
{{- if and (hasPrefix (printf "%s/" $path) (printf "%s/" $source)) (not (hasKey $taken $path)) -}}
{{- range $volume := $owner.volumes -}}
{{- if eq $volume.name $mount.name -}}
{{- $mountable := or (hasKey $volume "nfs") (hasKey $volume "csi") -}}
{{- with $volume.persistentVolumeClaim -}}
{{- $mountable = include "kvasir.fit.mountable" (dict "root" $root "claim" .claimName "modes" list "made" false) -}}
{{- end -}}
{{- if $mountable -}}
{{- $name := dict "name" (printf "source-%d" (len $taken)) -}}
{{- $_ := set $taken $path true -}}
{{- $mounted := mergeOverwrite (deepCopy $mount) $name (dict "readOnly" true) -}}
{{- $found = append $found (dict "volume" (mergeOverwrite (deepCopy $volume) $name) "mount" $mounted) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}
