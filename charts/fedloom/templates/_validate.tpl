{{/* Checks that the schema cannot express. Each error names its key and what to do. */}}
{{- define "fedloom.validate" -}}
{{- $v := .Values }}
{{- $wrong := list }}
{{- /* Keys that are common in other charts but do not exist here. */}}
{{- $other := dict
  "replicaCount" "an aggregator is one; of workers it is workers.replicas"
  "persistence" "see state"
  "config" "see experiment.values"
  "secret" "secrets are made outside of the chart: see storage.existingSecret, tls.secret, auth.tokens.existingSecret"
  "token" "secrets are made outside of the chart: see auth.tokens.existingSecret, workers.token.existingSecret" }}
{{- range $key, $advice := $other }}
{{- if hasKey $v $key }}{{ $wrong = append $wrong (printf "%s: no key of this chart; %s" $key $advice) }}{{ end }}
{{- end }}
{{- if ne (int $v.aggregator.replicas) 1 }}
{{- $wrong = append $wrong (printf "aggregator.replicas: found %d; allowed: 1, because two aggregators would be two federations. More clients need more workers" (int $v.aggregator.replicas)) }}
{{- end }}
{{- if and (not $v.experiment.values) (not $v.experiment.configMap.name) }}
{{- $wrong = append $wrong "experiment: found none; allowed: experiment.values, or experiment.configMap.name of a ConfigMap that exists" }}
{{- end }}
{{- if and $v.experiment.values $v.experiment.configMap.name }}
{{- $wrong = append $wrong "experiment.configMap.name: found with experiment.values; allowed: one of them" }}
{{- end }}
{{- if or (eq $v.image.tag "latest") (eq $v.workers.image.tag "latest") }}
{{- $wrong = append $wrong "image.tag: found latest, which may be another one tomorrow; allowed: a version, or image.digest" }}
{{- end }}
{{- $url := include "fedloom.storageUrl" . }}
{{- if and (eq $v.state.kind "objectStore") (not $url) }}
{{- $wrong = append $wrong "state.kind: found objectStore without a store; allowed with storage.url, or seaweedfs.enabled" }}
{{- end }}
{{- if and (ne $v.workers.kind "none") (not $url) }}
{{- $wrong = append $wrong (printf "workers.kind: found %s without a store; allowed with storage.url, where their partition and states are" $v.workers.kind) }}
{{- end }}
{{- if and $url (not $v.storage.existingSecret) }}
{{- $wrong = append $wrong "storage.existingSecret: found none with a store; allowed: a Secret with its credentials, made outside of the chart" }}
{{- end }}
{{- if and $v.workers.partition.prepare (eq $v.workers.kind "none") }}
{{- $wrong = append $wrong "workers.partition.prepare: found with workers.kind none; allowed: with workers, who serve the partition" }}
{{- end }}
{{- if and (eq $v.workers.device "cuda") (not (include "fedloom.hasGpu" .)) }}
{{- $wrong = append $wrong "workers.device: found cuda without a GPU; allowed with one among workers.resources.limits, such as nvidia.com/gpu: 1" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") (not $v.tls.secret.name) }}
{{- $wrong = append $wrong "tls.secret.name: found none with tls.mode secret; allowed: a Secret with the aggregator's certificate" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") $v.tls.mutual (not $v.tls.secret.ca) }}
{{- $wrong = append $wrong "tls.secret.ca: found none with tls.mutual; allowed: the key of the authorities whose certificates peers must have" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") (not $v.tls.mutual) (ne $v.workers.kind "none") (not $v.tls.secret.ca) }}
{{- $wrong = append $wrong "tls.secret.ca: found none with workers; allowed: the key of the authorities by which they know the aggregator" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") $v.tls.mutual (ne $v.workers.kind "none") (not $v.workers.tls.existingSecret) }}
{{- $wrong = append $wrong "workers.tls.existingSecret: found none with tls.mode secret and tls.mutual; allowed: a Secret with the workers' own certificate" }}
{{- end }}
{{- if and (include "fedloom.unprotected" .) (not $v.insecure) }}
{{- if eq $v.tls.mode "none" }}
{{- $wrong = append $wrong "tls.mode: found none; allowed with insecure: true, where a gateway or a mesh encrypts" }}
{{- end }}
{{- if not (include "fedloom.known" .) }}
{{- $wrong = append $wrong "tls.mutual: found no way to know who comes; allowed: tls.mutual, auth.tokens.existingSecret, or insecure: true" }}
{{- end }}
{{- end }}
{{- if and $v.auth.identities (not (include "fedloom.known" .)) }}
{{- $wrong = append $wrong "auth.identities: found, and nobody has to say who they are; allowed with tls.mutual or auth.tokens.existingSecret" }}
{{- end }}
{{- if and $v.auth.tokens.existingSecret (not (include "fedloom.mutual" .)) (ne $v.workers.kind "none") (not $v.workers.token.existingSecret) }}
{{- $wrong = append $wrong "workers.token.existingSecret: found none, and peers are known by tokens alone; allowed: a Secret with a token" }}
{{- end }}
{{- $named := "" }}
{{- range $v.auth.identities }}{{ if or (has "worker" .roles) (has "observer" .roles) }}{{ $named = "true" }}{{ end }}{{ end }}
{{- if and $v.auth.identities (ne $v.workers.kind "none") (not (include "fedloom.ownCertificates" .)) (not $named) }}
{{- $wrong = append $wrong (printf "auth.identities: found none with the role worker, and workers.kind %s, who would all be refused; allowed: an identity of what they show" $v.workers.kind) }}
{{- end }}
{{- if and $v.auth.identities (ne $v.workers.kind "none") (include "fedloom.ownCertificates" .) $v.workers.token.existingSecret }}
{{- $wrong = append $wrong "workers.token.existingSecret: found with auth.identities, tls.mode certManager and tls.mutual, where the table knows workers by their certificate, and a token would be another identity; allowed: none" }}
{{- end }}
{{- $ended := "" }}
{{- if $v.gateway.grpcRoute.enabled }}{{ $ended = "gateway.grpcRoute.enabled" }}{{ else if and $v.ingress.enabled (eq $v.tls.mode "none") }}{{ $ended = "ingress.enabled and tls.mode none" }}{{ end }}
{{- if and $ended (not $v.auth.tokens.existingSecret) }}
{{- $wrong = append $wrong (printf "auth.tokens.existingSecret: found none with %s, behind which nobody's certificate reaches the aggregator; allowed: a Secret with the file of tokens" $ended) }}
{{- end }}
{{- $public := "" }}
{{- if eq $v.service.type "LoadBalancer" }}{{ $public = "service.type LoadBalancer" }}{{ else if $v.ingress.enabled }}{{ $public = "ingress.enabled" }}{{ end }}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.peers) (ne $v.workers.kind "none") $public }}
{{- $wrong = append $wrong (printf "networkPolicy.peers: found none with %s, through which nobody could come; allowed: who may, such as [{ipBlock: {cidr: 203.0.113.0/24}}], or networkPolicy.enabled: false" $public) }}
{{- end }}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.peers) (eq $v.workers.kind "none") }}
{{- $wrong = append $wrong "networkPolicy.peers: found none with workers.kind none, so that nobody could dial the aggregator; allowed: who may, such as [{ipBlock: {cidr: 203.0.113.0/24}}], or networkPolicy.enabled: false" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.workers.aggregator (not $v.networkPolicy.workersEgress) (ne $v.workers.kind "none") }}
{{- $wrong = append $wrong (printf "networkPolicy.workersEgress: found none with workers.aggregator %s, which workers could not reach; allowed: a rule to where it is" $v.workers.aggregator) }}
{{- end }}
{{- if and $v.networkPolicy.enabled $url (not $v.networkPolicy.store.to) (not $v.seaweedfs.enabled) }}
{{- $wrong = append $wrong "networkPolicy.store.to: found none with a store, which pods could not reach; allowed: where it is, such as [{ipBlock: {cidr: 198.51.100.7/32}}], or networkPolicy.enabled: false" }}
{{- end }}
{{- if and $v.tracing.enabled (not $v.tracing.endpoint) }}
{{- $wrong = append $wrong "tracing.endpoint: found none with tracing.enabled; allowed: a collector, such as http://collector.monitoring:4317" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.tracing.enabled (not $v.networkPolicy.collector.to) }}
{{- $wrong = append $wrong "networkPolicy.collector.to: found none with tracing.enabled, so that nobody could reach the collector; allowed: where it is, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.metrics.serviceMonitor.enabled (not $v.networkPolicy.metrics) }}
{{- $wrong = append $wrong "networkPolicy.metrics: found none with metrics.serviceMonitor.enabled, so that Prometheus could not read; allowed: where it is, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- if and $v.metrics.prometheusRule.enabled (not $v.metrics.serviceMonitor.enabled) }}
{{- $wrong = append $wrong "metrics.prometheusRule.enabled: found without metrics.serviceMonitor.enabled, whose labels alerts select by: without them one would fire for ever; allowed: with it" }}
{{- end }}
{{- if and (not $v.metrics.enabled) (or $v.metrics.serviceMonitor.enabled $v.metrics.prometheusRule.enabled $v.metrics.dashboard.enabled) }}
{{- $wrong = append $wrong "metrics.enabled: found false with a monitor, alerts or a dashboard; allowed: true with them" }}
{{- end }}
{{- if and (or $v.gateway.tlsRoute.enabled $v.gateway.grpcRoute.enabled) (not $v.gateway.parentRefs) }}
{{- $wrong = append $wrong "gateway.parentRefs: found none with a route; allowed: the gateways that it belongs to" }}
{{- end }}
{{- if and $v.gateway.tlsRoute.enabled (eq $v.tls.mode "none") }}
{{- $wrong = append $wrong "gateway.tlsRoute.enabled: found with tls.mode none, and it lets TLS through; allowed with TLS, or gateway.grpcRoute" }}
{{- end }}
{{- if and $v.gateway.tlsRoute.enabled (not $v.gateway.hostnames) }}
{{- $wrong = append $wrong "gateway.hostnames: found none with gateway.tlsRoute; allowed: names under which members dial, by which TLS is routed" }}
{{- end }}
{{- if and $v.gateway.grpcRoute.enabled (ne $v.tls.mode "none") }}
{{- $wrong = append $wrong (printf "gateway.grpcRoute.enabled: found with tls.mode %s, and TLS would end at the gateway; allowed with tls.mode none, or gateway.tlsRoute" $v.tls.mode) }}
{{- end }}
{{- if and $v.ingress.tlsSecret (ne $v.tls.mode "none") }}
{{- $wrong = append $wrong (printf "ingress.tlsSecret: found with tls.mode %s, and TLS would end at the ingress; allowed with tls.mode none" $v.tls.mode) }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- $wrong = append $wrong "ingress.host: found none; allowed: the name under which members dial" }}
{{- end }}
{{- if and $v.serve.enabled (not $url) }}
{{- $wrong = append $wrong "serve.enabled: found without a store, from which models are handed out; allowed with storage.url" }}
{{- end }}
{{- if and $v.serve.enabled $v.networkPolicy.enabled (not $v.networkPolicy.servePeers) }}
{{- $wrong = append $wrong "networkPolicy.servePeers: found none with serve.enabled, so that nobody could ask; allowed: who may, such as [{namespaceSelector: {}}] for the cluster" }}
{{- end }}
{{- if and $v.serve.enabled (has (int $v.serve.port) (list 7735 7736)) }}
{{- $wrong = append $wrong (printf "serve.port: found %d, where pods serve health and metrics; allowed: another one" (int $v.serve.port)) }}
{{- end }}
{{- if and $v.serve.enabled $v.serve.autoscaling.enabled (not (dig "requests" "cpu" "" $v.serve.resources)) }}
{{- $wrong = append $wrong "serve.resources.requests.cpu: found none with serve.autoscaling.enabled, which goes by the part of it that is used; allowed: an amount, or serve.autoscaling.enabled: false" }}
{{- end }}
{{- if and $v.serve.autoscaling.enabled (gt (int $v.serve.autoscaling.minReplicas) (int $v.serve.autoscaling.maxReplicas)) }}
{{- $wrong = append $wrong (printf "serve.autoscaling.minReplicas: found %d; allowed: at most maxReplicas, %d" (int $v.serve.autoscaling.minReplicas) (int $v.serve.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and $v.test.data (not $v.serve.enabled) }}
{{- $wrong = append $wrong "test.data: found without serve.enabled; allowed: with it, where the test asks for a model" }}
{{- end }}
{{- $bucket := first (splitList "/" (trimPrefix "s3://" $v.storage.url)) }}
{{- if and $v.seaweedfs.enabled $v.storage.url (ne $bucket $v.seaweedfs.bucket) }}
{{- $wrong = append $wrong (printf "storage.url: found the bucket %s with seaweedfs.enabled, which makes %s; allowed: that one, or no URL" $bucket $v.seaweedfs.bucket) }}
{{- end }}
{{- if and $v.seaweedfs.enabled $v.storage.endpoint }}
{{- $wrong = append $wrong "storage.endpoint: found with seaweedfs.enabled; allowed: one of them" }}
{{- end }}
{{- if and (ne $v.service.type "LoadBalancer") (or $v.service.loadBalancerClass $v.service.loadBalancerSourceRanges) }}
{{- $wrong = append $wrong (printf "service.type: found %s with what only a load balancer has; allowed: LoadBalancer" $v.service.type) }}
{{- end }}
{{- $labels := dict "commonLabels" $v.commonLabels "metrics.serviceMonitor.labels" $v.metrics.serviceMonitor.labels "metrics.prometheusRule.labels" $v.metrics.prometheusRule.labels "metrics.dashboard.labels" $v.metrics.dashboard.labels }}
{{- range list "aggregator" "workers" "serve" }}{{ $_ := set $labels (printf "%s.podLabels" .) (index $v . "podLabels") }}{{ end }}
{{- range $key, $of := $labels }}
{{- range $label, $_ := $of }}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) (hasPrefix "fedloom.dev/" $label) }}
{{- $wrong = append $wrong (printf "%s: found %s, by which the chart finds what is its own; allowed: labels that do not begin with app.kubernetes.io/, helm.sh/ or fedloom.dev/" $key $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $wrong }}
{{- fail (printf "\n\nThese values cannot be installed:\n  - %s\n" (join "\n  - " $wrong)) }}
{{- end }}
{{- end }}

{{- define "fedloom.hasGpu" -}}
{{- range $name, $count := (.Values.workers.resources).limits }}{{ if contains "/" $name }}true{{ end }}{{ end -}}
{{- end }}
