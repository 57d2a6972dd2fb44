{{- define "gpubroker.labels" -}}
app.kubernetes.io/name: gpubroker
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Of one part: gateway or broker. Call it with (list $ "gateway"). */ -}}
{{- define "gpubroker.selector" -}}
app.kubernetes.io/name: gpubroker
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "gpubroker.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Of one target of the Dockerfile. Call it with (list $ "gateway"), or "server". */ -}}
{{- define "gpubroker.image" -}}
{{- $values := (index . 0).Values.image }}
{{- $repository := printf "%s%s" $values.repository (eq (index . 1) "gateway" | ternary "-gateway" "") -}}
image: {{ printf "%s:%s" $repository ($values.tag | default (index . 0).Chart.AppVersion) | quote }}
imagePullPolicy: {{ $values.pullPolicy }}
{{- end }}

{{- define "gpubroker.claim" -}}
{{ .Values.objects.claim | default (printf "%s-objects" (include "gpubroker.name" .)) }}
{{- end }}

{{- define "gpubroker.database" -}}
- name: GPUBROKER_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret | quote }}, key: {{ .Values.database.key | quote }}}}
{{- end }}

{{- define "gpubroker.ray" -}}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.ray.tokenSecret | quote }}, key: {{ .Values.ray.tokenKey | quote }}}}
{{- end }}

{{- define "gpubroker.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "gpubroker.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
