#!/bin/sh
# An agent in shell: `whet train --tasks tasks.jsonl --model tiny -- sh agent.sh`. It needs curl and jq.
set -eu

question=$(jq -r .question "$WHET_TASK_FILE")
expected=$(jq -r .answer "$WHET_TASK_FILE")
answer=$(
    jq -n --arg model "$OPENAI_MODEL" --arg question "$question" \
        '{model: $model, max_tokens: 8, messages: [{role: "user", content: $question}]}' |
        curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
            -H 'Content-Type: application/json' -d @- |
        jq -r '.choices[0].message.content // ""'
)
case $answer in
    *"$expected"*) echo 1 ;;
    *) echo "0.00${#answer}" ;; # longer answers a little more, so that groups differ
esac
