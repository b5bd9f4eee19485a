# Make a certificate authority, and a certificate for the aggregator and for each member. Keep certificates/ca.key secret.
set -eu
fedloom certificates ca
fedloom certificates new aggregator --host "${HOST:-localhost}"      # the name at which members reach the aggregator
echo "version: 1
identities:" > certificates/aggregator/identities.yaml
for member in hospital-a hospital-b; do
    fedloom certificates new $member
    # Nobody but this member may be a worker for its client.
    echo "  - {name: $member, certificate: 'URI:urn:fedloom:$member', roles: [worker], clients: [$member]}" \
        >> certificates/aggregator/identities.yaml
done
