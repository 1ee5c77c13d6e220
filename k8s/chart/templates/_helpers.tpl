{{/* The reference of an image. Takes `image`, a default `repository` and a default `tag`. */}}
{{- define "pdserve.image" -}}
{{- $repository := default .repository .image.repository -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{/* Directory of the model, and its name for clients. */}}
{{- define "pdserve.directory" -}}
{{ default (base (regexReplaceAll "@.*$" .model.source "") | lower) .model.directory }}
{{- end -}}

{{- define "pdserve.model" -}}
{{ default (include "pdserve.directory" .) .model.name }}
{{- end -}}

{{/*
Settings of a process as variables, in JSON: `max-model-len` of `DECODE` is PDSERVE_DECODE__MAX_MODEL_LEN. Those that the
pods have already would be without effect, or there twice.
*/}}
{{- define "pdserve.variables" -}}
{{- $variables := dict -}}
{{- $ofPods := list "config" "model" "served-model-name" "worker-id" "host" "port" "grpc-port" "http-port" "stream-port" "admin-port" "threads" "redis-url" "redis-prefix" "state-url" "cluster-secret-file" "peer-ssl-certfile" "peer-ssl-keyfile" "peer-ssl-ca-certs" "peer-ssl-server-name" "api-keys-file" -}}
{{- range $flag, $value := .settings -}}
{{- if has $flag $ofPods -}}
{{- fail (printf "%s.settings.%s is what the chart's pods set themselves. Use another value of the chart, or an overlay of the manifests." (lower $.process) $flag) -}}
{{- end -}}
{{- $text := kindIs "float64" $value | ternary (toJson $value) (toString $value) -}}
{{- $_ := set $variables (printf "PDSERVE_%s__%s" $.process ($flag | upper | replace "-" "_")) $text -}}
{{- end -}}
{{ toJson $variables }}
{{- end -}}

{{/* What the ConfigMaps of the base hold here, by name without the hash, in JSON. */}}
{{- define "pdserve.configs" -}}
{{- $v := .Values -}}
{{- $settings := dict -}}
{{- range $tier := list "prefill" "decode" -}}
{{- $own := merge dict ((index $v $tier).settings | default dict) (dict "tensor-parallel-size" 1) -}}
{{- $settings = merge $settings (include "pdserve.variables" (dict "process" (upper $tier) "settings" $own) | fromJson) -}}
{{- end -}}
{{- $model := dict "MODEL_SOURCE" $v.model.source "MODEL_DIR" (include "pdserve.directory" $v) "SERVED_MODEL_NAME" (include "pdserve.model" $v) "RELEASE" (include "pdserve.worker" .) -}}
{{- $configs := dict "pdserve-model" $model "pdserve-settings" $settings -}}
{{- if $v.gpu.enabled -}}
{{- $_ := set $configs "pdserve-workers" (dict "prefill.toml" (.Files.Get "files/gpu/prefill.toml") "decode.toml" (.Files.Get "files/gpu/decode.toml")) -}}
{{- end -}}
{{ toJson $configs }}
{{- end -}}

{{- define "pdserve.worker" -}}
{{ include "pdserve.image" (dict "image" .Values.images.worker "repository" (ternary "pdserve-cuda" "pdserve-cpu" .Values.gpu.enabled) "tag" .Chart.AppVersion) }}
{{- end -}}

{{/* Changes the pod of a worker for a GPU per rank, as k8s/components/gpu does. Takes `pod`, `tier` and `ranks`. */}}
{{- define "pdserve.onGpu" -}}
{{- $pod := .pod -}}
{{- $_ := set $pod "tolerations" (append ($pod.tolerations | default list) (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule")) -}}
{{- $_ := set $pod "volumes" (append $pod.volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" "8Gi"))) -}}
{{- range $pod.initContainers -}}
{{- $_ := set . "env" (append .env (dict "name" "NVIDIA_VISIBLE_DEVICES" "value" "void")) -}}
{{- end -}}
{{- $worker := first $pod.containers -}}
{{- $_ := set $worker "command" (list "python" "-P" "-m" (printf "%s_svc" .tier)) -}}
{{- $_ := set $worker.startupProbe "failureThreshold" 720 -}}
{{- $_ := set $worker.securityContext "readOnlyRootFilesystem" false -}}
{{- $amounts := dict "cpu" "8" "memory" "64Gi" "nvidia.com/gpu" (toString .ranks) -}}
{{- $_ := set $worker "resources" (dict "requests" $amounts "limits" $amounts) -}}
{{- $_ := set $worker "volumeMounts" (append $worker.volumeMounts (dict "name" "shm" "mountPath" "/dev/shm")) -}}
{{- if eq .tier "prefill" -}}
{{- $_ := set $worker "args" (without $worker.args "--stream-port=50052") -}}
{{- $ports := list -}}
{{- range $worker.ports -}}
{{- if ne .name "stream" -}}{{- $ports = append $ports . -}}{{- end -}}
{{- end -}}
{{- $_ := set $worker "ports" $ports -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the file of API keys; empty: the one of the base. */}}
{{- define "pdserve.keys" -}}
{{ .Values.keys.existingSecret | default (.Values.keys.file | empty | ternary "" "pdserve-keys") }}
{{- end -}}

{{/* Has the router read API keys from another Secret. Takes `pod` and `secret`. */}}
{{- define "pdserve.withKeys" -}}
{{- $router := first .pod.containers -}}
{{- range .pod.volumes -}}
{{- if eq .name "secrets" -}}
{{- $items := list -}}
{{- range .secret.items -}}
{{- if ne .key "api-keys.toml" -}}{{- $items = append $items . -}}{{- end -}}
{{- end -}}
{{- $_ := set .secret "items" $items -}}
{{- end -}}
{{- end -}}
{{- $_ := set .pod "volumes" (append .pod.volumes (dict "name" "keys" "secret" (dict "secretName" .secret "defaultMode" 288))) -}}
{{- $_ := set $router "volumeMounts" (append $router.volumeMounts (dict "name" "keys" "mountPath" "/run/secrets/pdserve-keys" "readOnly" true)) -}}
{{- $args := without $router.args "--api-keys-file=/run/secrets/pdserve/api-keys.toml" -}}
{{- $_ := set $router "args" (append $args "--api-keys-file=/run/secrets/pdserve-keys/api-keys.toml") -}}
{{- end -}}

{{/* Replaces the URL of the store of responses by a Secret's. Takes the router's `pod` and `secret`. */}}
{{- define "pdserve.onOtherState" -}}
{{- $router := first .pod.containers -}}
{{- range $router.env -}}
{{- if eq .name "PDSERVE_ROUTER__STATE_URL" -}}
{{- $_ := unset . "value" -}}
{{- $_ := set . "valueFrom" (dict "secretKeyRef" (dict "name" $.secret "key" "url")) -}}
{{- end -}}
{{- end -}}
{{- $mounts := list -}}
{{- range $router.volumeMounts -}}
{{- if ne .name "state-secrets" -}}{{- $mounts = append $mounts . -}}{{- end -}}
{{- end -}}
{{- $_ := set $router "volumeMounts" $mounts -}}
{{- $volumes := list -}}
{{- range .pod.volumes -}}
{{- if ne .name "state-secrets" -}}{{- $volumes = append $volumes . -}}{{- end -}}
{{- end -}}
{{- $_ := set .pod "volumes" $volumes -}}
{{- end -}}

{{/* Replaces the URL of Redis in a container by a Secret's, and the prefix of keys by the namespace. */}}
{{- define "pdserve.onOtherRedis" -}}
{{- $env := list -}}
{{- range .container.env -}}
{{- if hasSuffix "__REDIS_URL" .name -}}
{{- $env = append $env (dict "name" .name "valueFrom" (dict "secretKeyRef" (dict "name" $.secret "key" "url"))) -}}
{{- $prefix := .name | replace "__REDIS_URL" "__REDIS_PREFIX" -}}
{{- $env = append $env (dict "name" $prefix "valueFrom" (dict "fieldRef" (dict "apiVersion" "v1" "fieldPath" "metadata.namespace"))) -}}
{{- else -}}
{{- $env = append $env . -}}
{{- end -}}
{{- end -}}
{{- $_ := set .container "env" $env -}}
{{- end -}}
