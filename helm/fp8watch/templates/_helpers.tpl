{{- define "fp8watch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* 50 characters at most: a component's suffix and a pod's hash have to fit into 63. */}}
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

{{/* What every container of ours may do: nothing. */}}
{{- define "fp8watch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Where Redis is, as an environment variable: a secret's, a given one's, or that of the server in this chart. */}}
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
  value: redis://{{ include "fp8watch.fullname" . }}-redis:{{ .Values.redis.port }}/0
{{- end }}
{{- end -}}

{{/* Who may read /metrics: where agent and controller find certificates and password. Nothing where nothing is asked. */}}
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

{{/* Only the keys that are read: the authority's secret may hold its private key. */}}
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

{{/* What a monitor brings, and how it trusts what it reaches. */}}
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

{{/* Settings that contradict each other stop the installation, naming the value to change. */}}
{{- define "fp8watch.check" -}}
{{- if and .Values.serviceMonitor.enabled .Values.podMonitor.enabled -}}
{{- fail "serviceMonitor.enabled and podMonitor.enabled: every sample would be scraped twice; choose one" -}}
{{- end -}}
{{- if and (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) (ne .Values.agent.metrics.scope "pod") -}}
{{- fail "agent.metrics.scope: a monitor cannot reach loopback; set it to pod" -}}
{{- end -}}
{{- if and .Values.metricsTls.existingSecret (not .Values.metricsTls.serverName) (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) -}}
{{- fail "metricsTls.serverName: monitors reach pods by their address; say which name in the certificate they check" -}}
{{- end -}}
{{- if and .Values.metricsTls.clientCaSecret (not .Values.metricsTls.existingSecret) -}}
{{- fail "metricsTls.clientCaSecret: certificates of scrapers are checked over TLS only; it needs metricsTls.existingSecret" -}}
{{- end -}}
{{- if and .Values.metricsTls.scraperSecret (not .Values.metricsTls.clientCaSecret) -}}
{{- fail "metricsTls.scraperSecret: nobody asks monitors for a certificate without metricsTls.clientCaSecret" -}}
{{- end -}}
{{- if and .Values.metricsTls.clientCaSecret (not .Values.metricsTls.scraperSecret) (or .Values.serviceMonitor.enabled .Values.podMonitor.enabled) -}}
{{- fail "metricsTls.scraperSecret: monitors have to show a certificate of metricsTls.clientCaSecret; say which" -}}
{{- end -}}
{{- if .Values.console.enabled -}}
{{- if not .Values.console.nodeSelector -}}
{{- fail "console.nodeSelector: the console reads the stores of one node; say which, e.g. {kubernetes.io/hostname: NODE}" -}}
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
