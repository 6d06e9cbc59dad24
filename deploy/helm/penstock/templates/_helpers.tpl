{{/* The release's name; it names every object, and begins the pods' host names. */}}
{{- define "penstock.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/component: training
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.serviceAccountName" -}}
{{- default (ternary (include "penstock.name" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{/* The job file. The admin server is reached from outside the pod; `hosts` says how many there are. What the
values say beside that is refused, not overwritten. */}}
{{- define "penstock.job" -}}
{{- $hosts := int .Values.hosts }}
{{- if dig "Penstock" "Admin" false .Values.job }}
{{- fail "job.Penstock.Admin is set by the chart, for its probes and scrapers; remove it and use the value admin" }}
{{- end }}
{{- $admin := dict "Host" "0.0.0.0" "Port" 9781 }}
{{- if .Values.admin.tokenSecret }}
{{- $admin = merge $admin (dict "TokenFile" "/run/secrets/penstock/token" "Protect" .Values.admin.protect) }}
{{- end }}
{{- if not (dig "CheckpointConfig" "LocalPath" "/opt/ml/" .Values.job | hasPrefix "/opt/ml/") }}
{{- fail "job.CheckpointConfig.LocalPath is not below /opt/ml, the volume that sidecar and trainer share; choose a directory there" }}
{{- end }}
{{- $own := dict "Penstock" (dict "Admin" $admin) }}
{{- $asked := int (dig "ResourceConfig" "InstanceCount" $hosts .Values.job) }}
{{- $groups := dig "ResourceConfig" "InstanceGroups" list .Values.job }}
{{- if $groups }}
{{- $asked = 0 }}
{{- range $groups }}{{ $asked = add $asked .InstanceCount }}{{ end }}
{{- else if gt $hosts 1 }}
{{- $_ := set $own "ResourceConfig" (dict "InstanceCount" $hosts) }}
{{- end }}
{{- if ne (int $asked) $hosts }}
{{- fail (printf "job.ResourceConfig asks for %d hosts, and hosts is %d; make them agree" (int $asked) $hosts) }}
{{- end }}
{{- toYaml (mergeOverwrite (deepCopy .Values.job) $own) }}
{{- end }}

{{/* The sum of these volumes in GiB, and the seconds that they take between pod and S3. */}}
{{- define "penstock.gib" -}}
{{- $sum := 0.0 }}
{{- range rest . }}{{ $sum = addf $sum (index (first $).Values.volumes .) }}{{ end }}
{{- round $sum 3 }}
{{- end }}
{{- define "penstock.seconds" -}}
{{- divf (mulf (include "penstock.gib" . | float64) 1073.741824) (first .).Values.sidecar.megabytesPerSecond | ceil | int }}
{{- end }}

{{- define "penstock.confined" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "penstock.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end }}

{{/* The keeper, for `initContainers` before the sidecar; its socket is in the volume `keeper`. */}}
{{- define "penstock.keeper" -}}
name: keeper
image: {{ include "penstock.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args: [keeper, /run/penstock/keeper]
# The sidecar starts when the socket is there.
startupProbe:
  exec: {command: [test, -S, /run/penstock/keeper]}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 60
resources: {{- toYaml .Values.keeper.resources | nindent 2 }}
securityContext:
  readOnlyRootFilesystem: true
  {{- include "penstock.confined" . | nindent 2 }}
volumeMounts:
  - {name: keeper, mountPath: /run/penstock}
{{- end }}

{{/* Where the sidecar finds the state that it resumes at; empty if it does not resume. */}}
{{- define "penstock.state" -}}
{{- if .Values.resume.state }}{{ .Values.resume.state }}
{{- else if .Values.resume.claim }}/checkpoints/state{{ if gt (int .Values.hosts) 1 }}-$(JOB_COMPLETION_INDEX){{ end }}.json
{{- end }}
{{- end }}

{{/* The sidecar, for `initContainers` of a pod whose volumes are `ml`, `job` and `penstock-tmp`, and `keeper`,
`checkpoints` and `admin-token` if the values ask for them. */}}
{{- define "penstock.sidecar" -}}
name: penstock
image: {{ include "penstock.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args:
  - run
  - -c
  - /etc/penstock/job.yaml
  - --log-level
  - {{ .Values.sidecar.logLevel }}
  {{- if .Values.keeper.enabled }}
  - --keeper
  - /run/penstock/keeper
  {{- end }}
  {{- with include "penstock.state" . }}
  - --resume
  - {{ . | quote }}
  {{- end }}
ports:
  - {name: admin, containerPort: 9781}
# A day: files may be as large as they are. Without a byte for `GiveUpAfter` seconds the sidecar ends by itself.
startupProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 86400
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- if eq .Values.credentials.kind "secret" }}
envFrom:
  - secretRef: {name: {{ .Values.credentials.secretName }}}
{{- end }}
{{- with .Values.sidecar.env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- toYaml .Values.sidecar.resources | nindent 2 }}
securityContext:
  readOnlyRootFilesystem: true
  {{- include "penstock.confined" . | nindent 2 }}
volumeMounts:
  - {name: ml, mountPath: /opt/ml}
  - {name: job, mountPath: /etc/penstock, readOnly: true}
  - {name: penstock-tmp, mountPath: /tmp}
  {{- if .Values.keeper.enabled }}
  - {name: keeper, mountPath: /run/penstock}
  {{- end }}
  {{- if .Values.resume.claim }}
  - {name: checkpoints, mountPath: /checkpoints, readOnly: true}
  {{- end }}
  {{- if .Values.admin.tokenSecret }}
  - {name: admin-token, mountPath: /run/secrets/penstock, readOnly: true}
  {{- end }}
{{- end }}
