{{- define "fp8watch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 50 characters, so that a component's suffix and a pod's hash fit into 63. */}}
{{- define "fp8watch.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments: root, component. */}}
{{- define "fp8watch.selectorLabels" -}}
app.kubernetes.io/name: {{ include "fp8watch.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "fp8watch.labels" -}}
{{ include "fp8watch.selectorLabels" . }}
app.kubernetes.io/part-of: fp8watch
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "fp8watch.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "fp8watch.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "fp8watch.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* Security context of every container: no privileges at all. */}}
{{- define "fp8watch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The URL of Redis as an environment variable: from a secret, from values, or of the server in this chart. */}}
{{- define "fp8watch.redisUrl" -}}
- name: FP8WATCH_REDIS_URL
{{- if .Values.externalRedis.existingSecret }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.externalRedis.existingSecret }}
      key: {{ .Values.externalRedis.existingSecretKey }}
{{- else if .Values.externalRedis.url }}
  value: {{ .Values.externalRedis.url | quote }}
{{- else }}
  value: redis://{{ include "fp8watch.fullname" . }}-redis:{{ int64 .Values.redis.port }}/0
{{- end }}
{{- end -}}

{{/* Secret keys as environment variables. Arguments: root, purposes (of command, frame, approval). */}}
{{- define "fp8watch.keysEnv" -}}
{{- $keys := .root.Values.keys -}}
{{- if $keys.existingSecret }}
{{- range .purposes }}
- name: FP8WATCH_{{ upper . }}_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $keys.existingSecret }}
      key: {{ get $keys (printf "%sKey" .) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The keys that a container is not given, neither by keys.existingSecret nor by its extraEnv, separated by commas; none
if it trusts Redis. Arguments: root, purposes, extraEnv. */}}
{{- define "fp8watch.missingKeys" -}}
{{- $given := list -}}
{{- range .extraEnv }}{{- $given = append $given .name }}{{- end -}}
{{- $missing := list -}}
{{- if not (or .root.Values.keys.existingSecret (has "FP8WATCH_ALLOW_UNSIGNED" $given)) -}}
{{- range .purposes -}}
{{- $name := printf "FP8WATCH_%s_KEY" (upper .) -}}
{{- if not (or (has $name $given) (has (printf "%s_FILE" $name) $given)) -}}
{{- $missing = append $missing $name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join ", " $missing -}}
{{- end -}}

{{/* Where agent and controller find the certificates and the password of /metrics; empty if none is configured. */}}
{{- define "fp8watch.metricsEnv" -}}
{{- if .Values.metricsTls.existingSecret }}
- name: FP8WATCH_METRICS_TLS_CERT
  value: /etc/fp8watch/metrics-tls/tls.crt
- name: FP8WATCH_METRICS_TLS_KEY
  value: /etc/fp8watch/metrics-tls/tls.key
{{- end }}
{{- if .Values.metricsTls.clientCaSecret }}
- name: FP8WATCH_METRICS_CLIENT_CA
  value: /etc/fp8watch/metrics-client-ca/ca.crt
{{- end }}
{{- if .Values.metricsPassword.existingSecret }}
- name: FP8WATCH_METRICS_PASSWORD_FILE
  value: /etc/fp8watch/metrics-password/credentials
{{- end }}
{{- end -}}

{{- define "fp8watch.metricsMounts" -}}
{{- if .Values.metricsTls.existingSecret }}
- name: metrics-tls
  mountPath: /etc/fp8watch/metrics-tls
  readOnly: true
{{- end }}
{{- if .Values.metricsTls.clientCaSecret }}
- name: metrics-client-ca
  mountPath: /etc/fp8watch/metrics-client-ca
  readOnly: true
{{- end }}
{{- if .Values.metricsPassword.existingSecret }}
- name: metrics-password
  mountPath: /etc/fp8watch/metrics-password
  readOnly: true
{{- end }}
{{- end -}}

{{/* Only the keys that are read: the authority's secret may also contain its private key. */}}
{{- define "fp8watch.metricsVolumes" -}}
{{- if .Values.metricsTls.existingSecret }}
- name: metrics-tls
  secret:
    secretName: {{ .Values.metricsTls.existingSecret }}
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- if .Values.metricsTls.clientCaSecret }}
- name: metrics-client-ca
  secret:
    secretName: {{ .Values.metricsTls.clientCaSecret }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- if .Values.metricsPassword.existingSecret }}
- name: metrics-password
  secret:
    secretName: {{ .Values.metricsPassword.existingSecret }}
    items: [{key: credentials, path: credentials}]
{{- end }}
{{- end -}}

{{/* The scheme, TLS settings and credentials of a monitor. */}}
{{- define "fp8watch.metricsEndpoint" -}}
{{- if .Values.metricsTls.existingSecret }}
scheme: https
tlsConfig:
  serverName: {{ .Values.metricsTls.serverName }}
  ca:
    secret:
      name: {{ .Values.metricsTls.existingSecret }}
      key: ca.crt
  {{- with .Values.metricsTls.scraperSecret }}
  cert:
    secret:
      name: {{ . }}
      key: tls.crt
  keySecret:
    name: {{ . }}
    key: tls.key
  {{- end }}
{{- end }}
{{- with .Values.metricsPassword.existingSecret }}
basicAuth:
  username:
    name: {{ . }}
    key: username
  password:
    name: {{ . }}
    key: password
{{- end }}
{{- end -}}

{{/* Arguments: root, component (its values). */}}
{{- define "fp8watch.podPlacement" -}}
serviceAccountName: {{ include "fp8watch.serviceAccountName" .root }}
automountServiceAccountToken: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (.component.tolerations | default list) (.component.extraTolerations | default list) }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .component.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Contradicting values stop the installation with a message that names the value to change. */}}
{{- define "fp8watch.check" -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled and podMonitor.enabled: every sample would be scraped twice; choose one" -}}
{{- end -}}
{{- if and (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) (ne .Values.agent.metrics.scope "pod") -}}
{{- fail "agent.metrics.scope: a monitor cannot reach loopback; set it to pod" -}}
{{- end -}}
{{- if and .Values.metricsTls.existingSecret (not .Values.metricsTls.serverName) (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) -}}
{{- fail "metricsTls.serverName: monitors reach pods by IP address; give the name in the certificate that they check" -}}
{{- end -}}
{{- if and .Values.metricsTls.clientCaSecret (not .Values.metricsTls.existingSecret) -}}
{{- fail "metricsTls.clientCaSecret: certificates of scrapers are checked over TLS only; it needs metricsTls.existingSecret" -}}
{{- end -}}
{{- if and .Values.metricsTls.scraperSecret (not .Values.metricsTls.clientCaSecret) -}}
{{- fail "metricsTls.scraperSecret: without metricsTls.clientCaSecret monitors are not asked for a certificate" -}}
{{- end -}}
{{- if and .Values.metricsTls.clientCaSecret (not .Values.metricsTls.scraperSecret) (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) -}}
{{- fail "metricsTls.scraperSecret: monitors need a client certificate of the authority in metricsTls.clientCaSecret" -}}
{{- end -}}
{{- if .Values.console.enabled -}}
{{- if not .Values.console.nodeSelector -}}
{{- fail "console.nodeSelector: the console reads the stores of one node; select it, e.g. {kubernetes.io/hostname: NODE}" -}}
{{- end -}}
{{- if not .Values.agent.dataHostPath -}}
{{- fail "agent.dataHostPath: the console reads the stores there; it cannot be empty with console.enabled" -}}
{{- end -}}
{{- if and (not .Values.console.tls.existingSecret) (not .Values.console.allowPlain) -}}
{{- fail "console.tls.existingSecret: the console listens on the pod's address: give a certificate, or set console.allowPlain" -}}
{{- end -}}
{{- if and .Values.console.tls.existingSecret .Values.console.allowPlain -}}
{{- fail "console.tls.existingSecret and console.allowPlain: choose one" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.enabled (or .Values.externalRedis.url .Values.externalRedis.existingSecret) -}}
{{- fail "redis.enabled and externalRedis: choose one (redis.enabled=false for a server of your own)" -}}
{{- end -}}
{{- if and .Values.controller.enabled (not .Values.redis.enabled) (not .Values.externalRedis.url) (not .Values.externalRedis.existingSecret) -}}
{{- fail "controller.enabled: it needs redis.enabled, externalRedis.url or externalRedis.existingSecret" -}}
{{- end -}}
{{- end -}}
