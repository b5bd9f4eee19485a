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
{{- $wrong = append $wrong (printf "aggregator.replicas: is %d; set it to 1. Two aggregators would be two federations; add workers for more clients" (int $v.aggregator.replicas)) }}
{{- end }}
{{- $here := $v.aggregator.enabled }}
{{- if and $here (not $v.experiment.values) (not $v.experiment.configMap.name) }}
{{- $wrong = append $wrong "experiment: no experiment is set; set experiment.values, or experiment.configMap.name to an existing ConfigMap" }}
{{- end }}
{{- if and $v.experiment.values $v.experiment.configMap.name }}
{{- $wrong = append $wrong "experiment.configMap.name: experiment.values is set, too; set one of them" }}
{{- end }}
{{- if or (eq $v.image.tag "latest") (eq $v.workers.image.tag "latest") }}
{{- $wrong = append $wrong "image.tag: is latest, which may point to another image tomorrow; set a version, or image.digest" }}
{{- end }}
{{- $issued := $v.tls.certManager }}
{{- if ge (int (trimSuffix "h" $issued.renewBefore)) (int (trimSuffix "h" $issued.duration)) }}
{{- $wrong = append $wrong (printf "tls.certManager.renewBefore: is %s; set less than tls.certManager.duration, which is %s" $issued.renewBefore $issued.duration) }}
{{- end }}
{{- $url := include "fedloom.storageUrl" . }}
{{- if and $here (eq $v.state.kind "objectStore") (not $url) }}
{{- $wrong = append $wrong "state.kind: is objectStore, but there is no store; set storage.url or seaweedfs.enabled" }}
{{- end }}
{{- if and (include "fedloom.closed" .) (not $url) }}
{{- $wrong = append $wrong (printf "workers.kind: is %s, but there is no store for their partition and states; set storage.url, or workers.data to the folder of a member's own clients" $v.workers.kind) }}
{{- end }}
{{- if and $v.workers.data (or (ne $v.workers.kind "StatefulSet") (ne (int $v.workers.replicas) 1)) }}
{{- $wrong = append $wrong (printf "workers.data: is set with workers.kind %s and workers.replicas %d; set StatefulSet and 1, because one worker serves a folder of clients, and two would refuse each other" $v.workers.kind (int $v.workers.replicas)) }}
{{- end }}
{{- if and $v.workers.policy.values $v.workers.policy.configMap.name }}
{{- $wrong = append $wrong "workers.policy.configMap.name: workers.policy.values is set, too; set one of them" }}
{{- end }}
{{- if and $v.workers.data $v.workers.partition.url }}
{{- $wrong = append $wrong "workers.data: workers.partition.url is set, too; set one of them" }}
{{- end }}
{{- if not $here }}
{{- if eq $v.workers.kind "none" }}
{{- $wrong = append $wrong "aggregator.enabled: is false and workers.kind is none, so that nothing would be installed; set workers.kind" }}
{{- end }}
{{- if not $v.workers.aggregator }}
{{- $wrong = append $wrong "workers.aggregator: is not set, but aggregator.enabled is false; set the address of the aggregator, such as fl.example.org:443" }}
{{- end }}
{{- if and (eq $v.tls.mode "certManager") (not $v.tls.certManager.issuerRef.name) }}
{{- $wrong = append $wrong "tls.certManager.issuerRef.name: is not set, but aggregator.enabled is false: the aggregator would not trust a CA of this release; name an issuer of the aggregator's CA, or set tls.mode secret" }}
{{- end }}
{{- $elsewhere := dict
  "experiment" (or $v.experiment.values $v.experiment.configMap.name)
  "auth.tokens.existingSecret" $v.auth.tokens.existingSecret "auth.identities" $v.auth.identities
  "workers.partition.prepare" $v.workers.partition.prepare "serve.enabled" $v.serve.enabled
  "gateway.tlsRoute.enabled" $v.gateway.tlsRoute.enabled "gateway.grpcRoute.enabled" $v.gateway.grpcRoute.enabled
  "ingress.enabled" $v.ingress.enabled "seaweedfs.enabled" $v.seaweedfs.enabled }}
{{- range $key, $set := $elsewhere }}
{{- if $set }}
{{- $wrong = append $wrong (printf "%s: is set, but aggregator.enabled is false; set it in the release with the aggregator" $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $url (not $v.storage.existingSecret) }}
{{- $wrong = append $wrong "storage.existingSecret: is not set; set it to a Secret with the credentials of the store, created outside the chart" }}
{{- end }}
{{- if and $v.workers.partition.prepare (eq $v.workers.kind "none") }}
{{- $wrong = append $wrong "workers.partition.prepare: needs workers to serve the partition; set workers.kind" }}
{{- end }}
{{- $devices := include "fedloom.devices" . | fromJsonArray }}
{{- if and (eq $v.workers.device "cuda") (not $devices) }}
{{- $wrong = append $wrong "workers.device: is cuda, but workers.resources.limits has no GPU; add one, such as nvidia.com/gpu: 1" }}
{{- end }}
{{- range $devices }}
{{- if and (eq $v.workers.device "cpu") (regexMatch "^(nvidia|amd)\\.com/|/.*gpu" .) }}
{{- $wrong = append $wrong (printf "workers.device: is cpu, but workers.resources.limits has %s, which no worker would use; set cuda, or remove it" .) }}
{{- end }}
{{- end }}
{{- range $component := list "aggregator" "workers" "serve" }}
{{- $resources := (index $v $component).resources }}
{{- range $name, $amount := $resources.requests }}
{{- $limit := dig "limits" $name "not set" $resources | toString }}
{{- if and (contains "/" $name) (ne (toString $amount) $limit) }}
{{- $wrong = append $wrong (printf "%s.resources.requests: has %s: %v, and its limit is %s; set the limit alone: Kubernetes requests as many devices" $component $name $amount $limit) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $here (eq $v.tls.mode "secret") (not $v.tls.secret.name) }}
{{- $wrong = append $wrong "tls.secret.name: is not set, but tls.mode is secret; set it to a Secret with the aggregator's certificate" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") $v.tls.mutual (not $v.tls.secret.ca) }}
{{- $wrong = append $wrong "tls.secret.ca: is not set, but tls.mutual is; set it to the Secret's key with the authorities that sign peers' certificates" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") (not $v.tls.mutual) (ne $v.workers.kind "none") (not $v.tls.secret.ca) }}
{{- $wrong = append $wrong "tls.secret.ca: is not set; workers verify the aggregator with it: set the Secret's key with its authorities" }}
{{- end }}
{{- if and (eq $v.tls.mode "secret") (or $v.tls.mutual (not $here)) (ne $v.workers.kind "none") (not $v.workers.tls.existingSecret) }}
{{- $wrong = append $wrong (printf "workers.tls.existingSecret: is not set, but tls.mode is secret and %s; set it to a Secret with the workers' certificate, or without tls.mutual the CA certificates alone" (ternary "tls.mutual is on" "aggregator.enabled is false" $v.tls.mutual)) }}
{{- end }}
{{- if and (include "fedloom.unprotected" .) (not $v.insecure) }}
{{- if eq $v.tls.mode "none" }}
{{- $wrong = append $wrong "tls.mode: is none; enable TLS, or set insecure: true where a gateway or a mesh encrypts" }}
{{- end }}
{{- if not (include "fedloom.known" .) }}
{{- $wrong = append $wrong "tls.mutual: is off and there are no tokens, so peers cannot be identified; set tls.mutual, auth.tokens.existingSecret, or insecure: true" }}
{{- end }}
{{- end }}
{{- if and $v.auth.identities (not (include "fedloom.known" .)) }}
{{- $wrong = append $wrong "auth.identities: is set, but peers need not identify themselves; set tls.mutual or auth.tokens.existingSecret" }}
{{- end }}
{{- $signatures := toString ((($v.experiment.values).federation).secure_aggregation).signatures }}
{{- if and $v.workers.onlySums $v.experiment.values (ne $v.workers.kind "none") (not (has $signatures (list "keys" "certificates"))) }}
{{- $wrong = append $wrong "workers.onlySums: is on, but the experiment has no secure aggregation with signatures, so workers would refuse it; set experiment.values.federation.secure_aggregation.signatures to keys or certificates, or workers.onlySums: false" }}
{{- end }}
{{- if and (eq $signatures "keys") (ne $v.workers.kind "none") (not $v.workers.signing.existingSecret) }}
{{- $wrong = append $wrong "workers.signing.existingSecret: is not set, but the experiment has federation.secure_aggregation.signatures: keys; set it to a Secret with signing.key and signing-keys.txt" }}
{{- end }}
{{- if and $v.auth.tokens.existingSecret (not (include "fedloom.mutual" .)) (ne $v.workers.kind "none") (not $v.workers.token.existingSecret) }}
{{- $wrong = append $wrong "workers.token.existingSecret: is not set, but peers are identified by tokens alone; set it to a Secret with a token" }}
{{- end }}
{{- $named := "" }}
{{- range $v.auth.identities }}{{ if or (has "worker" .roles) (has "observer" .roles) }}{{ $named = "true" }}{{ end }}{{ end }}
{{- if and $v.auth.identities (ne $v.workers.kind "none") (not (include "fedloom.ownCertificates" .)) (not $named) }}
{{- $wrong = append $wrong (printf "auth.identities: has no identity with the role worker, so that workers of workers.kind %s would all be refused; add one for their certificate or token" $v.workers.kind) }}
{{- end }}
{{- if and $v.auth.identities (ne $v.workers.kind "none") (include "fedloom.ownCertificates" .) $v.workers.token.existingSecret }}
{{- $wrong = append $wrong "workers.token.existingSecret: is set with auth.identities, tls.mode certManager and tls.mutual, where workers are identified by their certificate and a token would be another identity; remove it" }}
{{- end }}
{{- $ended := "" }}
{{- if $v.gateway.grpcRoute.enabled }}{{ $ended = "gateway.grpcRoute.enabled" }}{{ else if and $v.ingress.enabled (eq $v.tls.mode "none") }}{{ $ended = "ingress.enabled and tls.mode none" }}{{ end }}
{{- if and $ended (not $v.auth.tokens.existingSecret) }}
{{- $wrong = append $wrong (printf "auth.tokens.existingSecret: is not set; behind %s no certificate reaches the aggregator: set it to a Secret with the tokens file" $ended) }}
{{- end }}
{{- $public := "" }}
{{- if eq $v.service.type "LoadBalancer" }}{{ $public = "service.type LoadBalancer" }}{{ else if $v.ingress.enabled }}{{ $public = "ingress.enabled" }}{{ end }}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.peers) (ne $v.workers.kind "none") $public }}
{{- $wrong = append $wrong (printf "networkPolicy.peers: is empty, so that nobody could connect through %s; list the peers, such as [{ipBlock: {cidr: 203.0.113.0/24}}], or set networkPolicy.enabled: false" $public) }}
{{- end }}
{{- if and $here $v.networkPolicy.enabled (not $v.networkPolicy.peers) (eq $v.workers.kind "none") }}
{{- $wrong = append $wrong "networkPolicy.peers: is empty and workers.kind is none, so that nobody could connect to the aggregator; list the peers, such as [{ipBlock: {cidr: 203.0.113.0/24}}], or set networkPolicy.enabled: false" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.workers.aggregator (not $v.networkPolicy.workersEgress) (ne $v.workers.kind "none") }}
{{- $wrong = append $wrong (printf "networkPolicy.workersEgress: is empty, so that workers could not reach workers.aggregator %s; add a rule that permits it" $v.workers.aggregator) }}
{{- end }}
{{- if and $v.networkPolicy.enabled $url (not $v.networkPolicy.store.to) (not $v.seaweedfs.enabled) }}
{{- $wrong = append $wrong "networkPolicy.store.to: is empty, so that pods could not reach the store; list its address, such as [{ipBlock: {cidr: 198.51.100.7/32}}], or set networkPolicy.enabled: false" }}
{{- end }}
{{- if and $v.tracing.enabled (not $v.tracing.endpoint) }}
{{- $wrong = append $wrong "tracing.endpoint: is not set, but tracing.enabled is; set a collector, such as http://collector.monitoring:4317" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.tracing.enabled (not $v.networkPolicy.collector.to) }}
{{- $wrong = append $wrong "networkPolicy.collector.to: is empty, so that pods could not reach the collector of tracing.enabled; list its place, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- if and $v.networkPolicy.enabled $v.metrics.serviceMonitor.enabled (not $v.networkPolicy.metrics) }}
{{- $wrong = append $wrong "networkPolicy.metrics: is empty, so that Prometheus could not read what metrics.serviceMonitor.enabled offers; list its place, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- if and $v.metrics.prometheusRule.enabled (not $v.metrics.serviceMonitor.enabled) }}
{{- $wrong = append $wrong "metrics.prometheusRule.enabled: needs metrics.serviceMonitor.enabled: alerts select by its labels, and one would fire forever without them. Enable both" }}
{{- end }}
{{- if and (not $v.metrics.enabled) (or $v.metrics.serviceMonitor.enabled $v.metrics.prometheusRule.enabled $v.metrics.dashboard.enabled) }}
{{- $wrong = append $wrong "metrics.enabled: is false, but a monitor, alerts or a dashboard is enabled; set it to true" }}
{{- end }}
{{- if and (or $v.gateway.tlsRoute.enabled $v.gateway.grpcRoute.enabled) (not $v.gateway.parentRefs) }}
{{- $wrong = append $wrong "gateway.parentRefs: is empty, but a route is enabled; list the gateways that the route belongs to" }}
{{- end }}
{{- if and $v.gateway.tlsRoute.enabled (eq $v.tls.mode "none") }}
{{- $wrong = append $wrong "gateway.tlsRoute.enabled: passes TLS through, but tls.mode is none; enable TLS, or use gateway.grpcRoute" }}
{{- end }}
{{- if and $v.gateway.tlsRoute.enabled (not $v.gateway.hostnames) }}
{{- $wrong = append $wrong "gateway.hostnames: is empty, but gateway.tlsRoute routes TLS by host name; list the names that members connect to" }}
{{- end }}
{{- if and $v.gateway.grpcRoute.enabled (ne $v.tls.mode "none") }}
{{- $wrong = append $wrong (printf "gateway.grpcRoute.enabled: ends TLS at the gateway, but tls.mode is %s; set tls.mode none, or use gateway.tlsRoute" $v.tls.mode) }}
{{- end }}
{{- if and $v.ingress.tlsSecret (ne $v.tls.mode "none") }}
{{- $wrong = append $wrong (printf "ingress.tlsSecret: ends TLS at the ingress, but tls.mode is %s; set tls.mode none" $v.tls.mode) }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- $wrong = append $wrong "ingress.host: is not set; set the name that members connect to" }}
{{- end }}
{{- if and $v.serve.enabled (not $url) }}
{{- $wrong = append $wrong "serve.enabled: needs a store to read models from; set storage.url" }}
{{- end }}
{{- if and $v.serve.enabled $v.networkPolicy.enabled (not $v.networkPolicy.servePeers) }}
{{- $wrong = append $wrong "networkPolicy.servePeers: is empty, so that nobody could use what serve.enabled offers; list the peers, such as [{namespaceSelector: {}}] for the cluster" }}
{{- end }}
{{- if and $v.serve.enabled (has (int $v.serve.port) (list 7735 7736)) }}
{{- $wrong = append $wrong (printf "serve.port: is %d, which pods use for health or metrics; choose another port" (int $v.serve.port)) }}
{{- end }}
{{- if and $v.serve.enabled $v.serve.autoscaling.enabled (not (dig "requests" "cpu" "" $v.serve.resources)) }}
{{- $wrong = append $wrong "serve.resources.requests.cpu: is not set, but serve.autoscaling.enabled scales by the used part of it; set an amount, or serve.autoscaling.enabled: false" }}
{{- end }}
{{- if and $v.serve.autoscaling.enabled (gt (int $v.serve.autoscaling.minReplicas) (int $v.serve.autoscaling.maxReplicas)) }}
{{- $wrong = append $wrong (printf "serve.autoscaling.minReplicas: is %d; set it to at most maxReplicas, %d" (int $v.serve.autoscaling.minReplicas) (int $v.serve.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and $v.ui.enabled (not $v.auth.tokens.existingSecret) }}
{{- $wrong = append $wrong "ui.enabled: needs tokens, which say who may open the page; set auth.tokens.existingSecret" }}
{{- end }}
{{- if and $v.ui.enabled (not $v.ui.existingClaim) (or (not $here) (ne $v.state.kind "persistentVolumeClaim") (eq $v.state.persistentVolumeClaim.accessMode "ReadWriteOncePod")) }}
{{- $wrong = append $wrong "ui.existingClaim: is empty, and the aggregator's volume cannot be mounted by another pod; set a claim with runs, or state.kind persistentVolumeClaim with accessMode ReadWriteOnce or ReadWriteMany" }}
{{- end }}
{{- if and $v.ui.enabled $v.networkPolicy.enabled (not $v.networkPolicy.uiPeers) }}
{{- $wrong = append $wrong "networkPolicy.uiPeers: is empty, so that nobody could open what ui.enabled offers; list the peers, such as [{namespaceSelector: {}}] for the cluster" }}
{{- end }}
{{- if and $v.test.data (not $v.serve.enabled) }}
{{- $wrong = append $wrong "test.data: needs serve.enabled: the test requests a model. Set serve.enabled, or remove test.data" }}
{{- end }}
{{- $bucket := first (splitList "/" (trimPrefix "s3://" $v.storage.url)) }}
{{- if and $v.seaweedfs.enabled $v.storage.url (ne $bucket $v.seaweedfs.bucket) }}
{{- $wrong = append $wrong (printf "storage.url: names the bucket %s, but seaweedfs.enabled creates %s; use that bucket, or no URL" $bucket $v.seaweedfs.bucket) }}
{{- end }}
{{- if and $v.seaweedfs.enabled $v.storage.endpoint }}
{{- $wrong = append $wrong "storage.endpoint: seaweedfs.enabled is set, too; set one of them" }}
{{- end }}
{{- if and (ne $v.service.type "LoadBalancer") (or $v.service.loadBalancerClass $v.service.loadBalancerSourceRanges) }}
{{- $wrong = append $wrong (printf "service.type: is %s, but settings of a load balancer are given; set LoadBalancer, or remove them" $v.service.type) }}
{{- end }}
{{- $labels := dict "commonLabels" $v.commonLabels "metrics.serviceMonitor.labels" $v.metrics.serviceMonitor.labels "metrics.prometheusRule.labels" $v.metrics.prometheusRule.labels "metrics.dashboard.labels" $v.metrics.dashboard.labels }}
{{- range list "aggregator" "workers" "serve" "ui" }}{{ $_ := set $labels (printf "%s.podLabels" .) (index $v . "podLabels") }}{{ end }}
{{- range $key, $of := $labels }}
{{- range $label, $_ := $of }}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) (hasPrefix "fedloom.dev/" $label) }}
{{- $wrong = append $wrong (printf "%s: the label %s is reserved, because the chart finds its objects by it; use labels that do not begin with app.kubernetes.io/, helm.sh/ or fedloom.dev/" $key $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $wrong }}
{{- fail (printf "\n\nThese values cannot be installed:\n  - %s\n" (join "\n  - " $wrong)) }}
{{- end }}
{{- end }}

{{/* Devices of the workers, as a JSON list: whatever resources of theirs have a vendor. */}}
{{- define "fedloom.devices" -}}
{{- $found := list }}
{{- range $name, $count := (.Values.workers.resources).limits }}{{ if contains "/" $name }}{{ $found = append $found $name }}{{ end }}{{ end -}}
{{- toJson $found }}
{{- end }}
