#!/bin/bash
# Runners on a Ray cluster, beside a store and a trainer on its head node.
#
#   examples/cluster/ray_job.sh HEAD_ADDRESS
#
# The nodes have whet[ray] installed; agent.py and whatever it imports is copied to them with the job.
set -euo pipefail
trap 'kill $(jobs -p); wait' EXIT  # however the training ends

head=${1:?the address of the head node, which all nodes reach}
export WHET_STORE=http://$head:4747
export WHET_STORE_TOKEN=${WHET_STORE_TOKEN:-$(head -c 32 /dev/urandom | base64 | tr -dc 'A-Za-z0-9')}

whet store --host 0.0.0.0 --port 4747 &
whet serve --gateway.host 0.0.0.0 --gateway.port 8000 --url "http://$head:8000" &
ray job submit --no-wait --address "http://$head:8265" --working-dir . \
    --runtime-env-json "{\"env_vars\": {\"WHET_STORE\": \"$WHET_STORE\", \"WHET_STORE_TOKEN\": \"$WHET_STORE_TOKEN\"}}" \
    -- whet runner agent.py:answer --ray auto --num 8 --concurrency 64

whet train --tasks tasks.jsonl --steps 50 # while it runs: whet runner --scale 16
