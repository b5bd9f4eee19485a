{{/* Name of the release, at most 40 characters, so that every suffix fits into 63. */}}
{{- define "fedloom.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Selector of a component's pods. It must never change between chart versions. */}}
{{- define "fedloom.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object: (dict "root" . "component" "aggregator"). */}}
{{- define "fedloom.labels" -}}
{{ include "fedloom.selector" . }}
app.kubernetes.io/part-of: fedloom
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with merge (dict) (default (dict) .labels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of a pod, without versions, so that a new chart version alone restarts nothing: (dict ... "own" .Values.workers). */}}
{{- define "fedloom.podLabels" -}}
{{ include "fedloom.selector" . }}
app.kubernetes.io/part-of: fedloom
{{- with merge (dict) (default (dict) (.own).podLabels) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Metadata of an object: (dict "root" . "component" "x" "name" "y" "annotations" (dict)). */}}
{{- define "fedloom.metadata" -}}
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "fedloom.labels" . | nindent 4 }}
  {{- $annotations := merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Image reference. A digest takes precedence over a tag, and a component's own image over the common one. A digest applies to its repository only. */}}
{{- define "fedloom.image" -}}
{{- $common := .root.Values.image -}}
{{- $own := default (dict) .own -}}
{{- $repository := default $common.repository $own.repository -}}
{{- $digest := ternary $common.digest "" (and (eq $repository $common.repository) (empty $own.tag)) -}}
{{- with default $digest $own.digest -}}{{ $repository }}@{{ . }}
{{- else -}}{{ $repository }}:{{ coalesce $own.tag $common.tag .root.Chart.AppVersion }}{{- end -}}
{{- end }}

{{- define "fedloom.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.podSecurityIds }}
{{ toYaml . }}
{{- end }}
{{- if (.Values.podSecurityIds).fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "fedloom.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Settings of every pod: no service account token and no service environment variables. */}}
{{- define "fedloom.podBasics" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  {{- include "fedloom.podSecurityContext" . | nindent 2 }}
{{- end }}

{{/* Scheduling of a component: (dict "root" . "component" "workers" "own" .Values.workers). With "revisions" true, as for a Deployment, only pods of one revision are spread, so that the pods that an upgrade replaces do not count. */}}
{{- define "fedloom.placing" -}}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if hasKey .own "topologySpreadConstraints" }}
{{- $ours := dict "labelSelector" (dict "matchLabels" (include "fedloom.selector" . | fromYaml)) }}
{{- $nodes := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" }}
{{- if .revisions }}{{ $_ := set $nodes "matchLabelKeys" (list "pod-template-hash") }}{{ end }}
{{- $all := list }}
{{- range default (list $nodes) .own.topologySpreadConstraints }}
{{- if hasKey . "labelSelector" }}{{ $all = append $all . }}{{ else }}{{ $all = append $all (merge (dict) . $ours) }}{{ end }}
{{- end }}
topologySpreadConstraints:
  {{- toYaml $all | nindent 2 }}
{{- end }}
{{- end }}

{{/* URLs of the store, the run and the partition, and the endpoint of the store. */}}
{{- define "fedloom.storageUrl" -}}
{{- if .Values.storage.url -}}{{ trimSuffix "/" .Values.storage.url }}
{{- else if .Values.seaweedfs.enabled -}}s3://{{ .Values.seaweedfs.bucket }}/{{ include "fedloom.fullname" . }}
{{- end -}}
{{- end }}
{{- define "fedloom.runUrl" -}}
{{- with include "fedloom.storageUrl" . -}}{{ . }}/runs/{{ include "fedloom.fullname" $ }}{{- end -}}
{{- end }}
{{- define "fedloom.partitionUrl" -}}
{{- $own := .Values.workers.partition.url -}}
{{- if $own -}}{{ $own }}{{- else -}}{{ include "fedloom.storageUrl" . }}/partitions/{{ include "fedloom.fullname" . }}{{- end -}}
{{- end }}
{{- define "fedloom.storageEndpoint" -}}
{{- if .Values.storage.endpoint -}}{{ .Values.storage.endpoint }}
{{- else if .Values.seaweedfs.enabled -}}http://{{ include "fedloom.fullname" . }}-seaweedfs.{{ .Release.Namespace }}.svc:8333
{{- end -}}
{{- end }}

{{/* Environment: home, log format, and the store with its credentials: (dict "root" . "secret" "name"). */}}
{{- define "fedloom.env" -}}
- name: HOME
  value: /work
- name: FEDLOOM_LOG_FORMAT
  value: {{ .root.Values.logFormat }}
{{- if include "fedloom.storageUrl" .root }}
- name: AWS_REGION
  value: {{ .root.Values.storage.region }}
{{- with include "fedloom.storageEndpoint" .root }}
- name: FEDLOOM_S3_ENDPOINT
  value: {{ . }}
{{- end }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .root.Values.storage.secretKeys.accessKey }}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .root.Values.storage.secretKeys.secretKey }}
{{- end }}
{{- end }}

{{/* Trackers of the aggregator. Their own settings are in `aggregator.extraEnv`. */}}
{{- define "fedloom.trackingEnv" -}}
{{- with .Values.tracking }}
- name: FEDLOOM_TRACK
  value: {{ join " " . }}
{{- end }}
{{- end }}

{{/* Environment of the aggregator and of workers if tracing is enabled. */}}
{{- define "fedloom.tracingEnv" -}}
{{- if .Values.tracing.enabled }}
- name: FEDLOOM_TRACING
  value: "true"
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .Values.tracing.endpoint }}
- name: OTEL_TRACES_SAMPLER
  value: parentbased_traceidratio
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .Values.tracing.ratio | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: service.namespace={{ .Release.Namespace }},fedloom.release={{ .Release.Name }}
{{- end }}
{{- end }}

{{/* Protection: "true" with mutual TLS, with authenticated clients, and if TLS or authentication is missing, respectively. */}}
{{- define "fedloom.mutual" -}}
{{- if and (ne .Values.tls.mode "none") .Values.tls.mutual }}true{{ end -}}
{{- end }}
{{- define "fedloom.known" -}}
{{- if or (include "fedloom.mutual" .) .Values.auth.tokens.existingSecret }}true
{{- else if and (not .Values.aggregator.enabled) .Values.workers.token.existingSecret }}true{{ end -}}
{{- end }}
{{- define "fedloom.unprotected" -}}
{{- if or (eq .Values.tls.mode "none") (not (include "fedloom.known" .)) }}true{{ end -}}
{{- end }}

{{/* Environment with the paths of TLS files: (dict "root" . "folder" "/etc/fedloom/tls" "certificate" true "ca" true). */}}
{{- define "fedloom.tlsEnv" -}}
{{- $keys := include "fedloom.tlsKeys" .root | fromYaml }}
{{- if .certificate }}
- name: FEDLOOM_TLS_CERTIFICATE
  value: {{ .folder }}/{{ $keys.certificate }}
- name: FEDLOOM_TLS_KEY
  value: {{ .folder }}/{{ $keys.key }}
{{- end }}
{{- if .ca }}
- name: FEDLOOM_TLS_CA
  value: {{ .folder }}/{{ $keys.ca }}
{{- end }}
{{- end }}
{{- define "fedloom.tlsKeys" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{ omit .Values.tls.secret "name" | toYaml }}
{{- else -}}
{certificate: tls.crt, key: tls.key, ca: ca.crt}
{{- end -}}
{{- end }}

{{/* TLS Secrets of the aggregator, of model serving, and of the chart's pods that connect to them. */}}
{{- define "fedloom.serverSecret" -}}
{{- if eq .Values.tls.mode "secret" -}}{{ .Values.tls.secret.name }}{{- else -}}{{ include "fedloom.fullname" . }}-aggregator-tls{{- end -}}
{{- end }}
{{- define "fedloom.serveSecret" -}}
{{- if eq .Values.tls.mode "secret" -}}{{ default .Values.tls.secret.name .Values.serve.tls.existingSecret }}{{- else -}}{{ include "fedloom.fullname" . }}-serve-tls{{- end -}}
{{- end }}
{{- define "fedloom.clientSecret" -}}
{{- if eq .root.Values.tls.mode "certManager" -}}{{ include "fedloom.fullname" .root }}-{{ .component }}-tls
{{- else -}}
{{- $own := ternary .root.Values.test.tls.existingSecret "" (eq .component "test") -}}
{{ coalesce $own .root.Values.workers.tls.existingSecret .root.Values.tls.secret.name }}
{{- end -}}
{{- end }}

{{/* Volume with a client's TLS Secret: without mutual TLS, only the CA certificates. */}}
{{- define "fedloom.clientTlsVolume" -}}
{{- $keys := include "fedloom.tlsKeys" .root | fromYaml }}
- name: tls
  secret:
    secretName: {{ include "fedloom.clientSecret" . }}
    defaultMode: 0440
    {{- if not (include "fedloom.mutual" .root) }}
    items:
      - {key: {{ $keys.ca }}, path: {{ $keys.ca }}}
    {{- end }}
{{- end }}

{{/* DNS names of a Service within the cluster. */}}
{{- define "fedloom.clusterNames" -}}
- {{ .name }}
- {{ .name }}.{{ .root.Release.Namespace }}
- {{ .name }}.{{ .root.Release.Namespace }}.svc
- {{ .name }}.{{ .root.Release.Namespace }}.svc.cluster.local
{{- end }}

{{/* "true" if the chart's own pods are identified by certificates that the chart requests. */}}
{{- define "fedloom.ownCertificates" -}}
{{- if and (eq .Values.tls.mode "certManager") (include "fedloom.mutual" .) }}true{{ end -}}
{{- end }}

{{/* Token of `helm test`. It falls back to the workers' token only if the test has no certificate of its own, because both together would be two identities. */}}
{{- define "fedloom.testToken" -}}
{{- $own := or (include "fedloom.ownCertificates" .) (and (include "fedloom.mutual" .) .Values.test.tls.existingSecret) -}}
{{- if .Values.test.token.existingSecret -}}{{ toYaml .Values.test.token }}
{{- else if and .Values.workers.token.existingSecret (not $own) -}}{{ toYaml .Values.workers.token }}
{{- end -}}
{{- end }}

{{/* "true" if `helm test` has the credentials it needs, and the CA certificates to verify the aggregator. */}}
{{- define "fedloom.tested" -}}
{{- if .Values.aggregator.enabled -}}
{{- $secret := or .Values.test.tls.existingSecret .Values.workers.tls.existingSecret -}}
{{- if include "fedloom.mutual" . -}}
{{- if or (include "fedloom.ownCertificates" .) $secret }}true{{ end -}}
{{- else if and (eq .Values.tls.mode "secret") (not .Values.tls.secret.ca) -}}
{{- else if or (include "fedloom.testToken" .) (not .Values.auth.tokens.existingSecret) }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* TLS and token options of a member's command: (dict "root" . "gateway" true) if it connects through a gateway, which may terminate TLS. */}}
{{- define "fedloom.memberOptions" -}}
{{- $tls := or .gateway (ne .root.Values.tls.mode "none") -}}
{{- $token := .root.Values.auth.tokens.existingSecret -}}
{{- if or $tls $token }}--credentials DIR {{ end -}}
{{- if and $token (not $tls) }}--insecure {{ end -}}
{{- end }}

{{/* Name of the state's PersistentVolumeClaim. */}}
{{- define "fedloom.claim" -}}
{{- default (printf "%s-state" (include "fedloom.fullname" .)) .Values.state.persistentVolumeClaim.existingClaim -}}
{{- end }}

{{/* Identity file, with the identities of the chart's own pods. */}}
{{- define "fedloom.identities" -}}
{{- $own := list }}
{{- if include "fedloom.ownCertificates" . }}
{{- $name := include "fedloom.fullname" . }}
{{- if ne .Values.workers.kind "none" }}
{{- $own = append $own (dict "name" (printf "%s-workers" $name) "certificate" (printf "URI:urn:fedloom:%s-workers" $name) "roles" (list "worker") "clients" (list "*")) }}
{{- end }}
{{- $own = append $own (dict "name" (printf "%s-test" $name) "certificate" (printf "URI:urn:fedloom:%s-test" $name) "roles" (ternary (list "watch" "personalize") (list "watch") (not (empty .Values.test.data)))) }}
{{- if .Values.test.data }}{{ $_ := set (last $own) "clients" (list "*") }}{{ end }}
{{- end }}
{{- toYaml (dict "version" 1 "identities" (concat .Values.auth.identities $own)) }}
{{- end }}

{{/* "true" if the workers serve a published partition, and not a member's own data. */}}
{{- define "fedloom.closed" -}}
{{- if and (ne .Values.workers.kind "none") (not .Values.workers.data) }}true{{ end -}}
{{- end }}

{{- define "fedloom.experimentConfigMap" -}}
{{- default (printf "%s-experiment" (include "fedloom.fullname" .)) .Values.experiment.configMap.name -}}
{{- end }}
