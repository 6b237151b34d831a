{{/* Of every object. KubeRay derives longer names from it, and allows them 63 characters. */}}
{{- define "windlass.fullname" -}}
{{- if contains "windlass" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-windlass" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "windlass.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: windlass
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/*
Which pods: takes the root and a component. Pods of Ray get these two labels alone: KubeRay finds its own by
app.kubernetes.io/name, which must stay what it makes it.
*/}}
{{- define "windlass.pods" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "windlass.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* What all pods say of themselves. */}}
{{- define "windlass.pod" -}}
serviceAccountName: {{ include "windlass.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.userId }}
  runAsGroup: {{ int64 .Values.userId }}
  fsGroup: {{ int64 .Values.userId }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "windlass.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A setting's value as the environment takes it. YAML's numbers arrive as floats, which Go would write as 1e+06. */}}
{{- define "windlass.setting" -}}
{{- if kindIs "slice" . -}}
{{- $parts := list -}}
{{- range . }}{{ $parts = append $parts (include "windlass.setting" .) }}{{ end -}}
{{- join "," $parts -}}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "windlass.homeClaim" -}}
{{- .Values.home.existingClaim | default (printf "%s-home" (include "windlass.fullname" .)) -}}
{{- end -}}

{{- define "windlass.tokenSecret" -}}
{{- .Values.ray.existingTokenSecret | default (printf "%s-ray-token" (include "windlass.fullname" .)) -}}
{{- end -}}

{{/* For who opens the database: not the processes of jobs. */}}
{{- define "windlass.databaseEnv" -}}
{{- with .Values.database.existingSecret }}
- name: WINDLASS_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.database.key }}
{{- end }}
{{- end -}}

{{/* Of Ray's processes and their drivers; as `windlass up` sets it, but for what keeps that one on loopback. */}}
{{- define "windlass.rayEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "windlass.tokenSecret" . }}
      key: token
- name: RAY_memory_monitor_refresh_ms
  value: "0"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_preload_python_modules
  value: windlass.actors.runtime.absent_packages
{{- end -}}

{{/* What a schema cannot say, as it is about several values. */}}
{{- define "windlass.check" -}}
{{- with .Values }}
{{- if not .database.existingSecret }}
{{- if eq .home.accessMode "ReadWriteMany" }}
{{- fail "home.accessMode is ReadWriteMany: SQLite must not lie on a network's file system; name a Secret with PostgreSQL's URL in database.existingSecret" }}
{{- end }}
{{- if gt (int .api.replicas) 1 }}
{{- fail (printf "api.replicas is %d: more than one needs PostgreSQL; name a Secret with its URL in database.existingSecret" (int .api.replicas)) }}
{{- end }}
{{- end }}
{{- if ge (int .box.sharedMemoryGib) (int .box.memoryGib) }}
{{- fail (printf "box.sharedMemoryGib is %d: must be less than box.memoryGib, which is %d and counts shared memory too" (int .box.sharedMemoryGib) (int .box.memoryGib)) }}
{{- end }}
{{- if ne (len .box.ssds) (len (uniq .box.ssds)) }}
{{- fail "box.ssds names a place twice; name each SSD once" }}
{{- end }}
{{- if and .metrics.serviceMonitor.enabled (not .metrics.serviceMonitor.keySecret.name) }}
{{- fail "metrics.serviceMonitor.enabled: /metrics asks for an API key; name a Secret that holds one in metrics.serviceMonitor.keySecret" }}
{{- end }}
{{- end }}
{{- end -}}
