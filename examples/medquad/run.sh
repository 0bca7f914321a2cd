#!/usr/bin/env bash
# Ten commands from rows to an exported private model, with the seconds of each: docs/recipes.md, "From rows to a model".
#
#     examples/medquad/run.sh DATA [WORK]
#
# DATA is a folder with MedQuAD's train.jsonl.gz and test.jsonl.gz, in rows {"prompt", "type", "source"}. WORK is a new
# folder, /tmp/medquad unless it is given. The commands of the product are coordinator and edge_client, on the path.
# Each source of the questions is a member, and the label is the type of a question.
set -euo pipefail

data=$(realpath "$1") work=${2:-/tmp/medquad}
mkdir "$work"
cd "$work"
export OMP_NUM_THREADS=1

# What members have already, and no command of ours: a file of its own for each.
python3 - "$data" <<'PYTHON'
import collections, gzip, json, pathlib, sys

parts, labels = collections.defaultdict(list), set()
for line in gzip.open(pathlib.Path(sys.argv[1], "train.jsonl.gz"), "rt"):
    row = json.loads(line)
    parts[row["source"].lower()].append(line)
    labels.add(row["type"])
for name, lines in parts.items():
    pathlib.Path(f"{name}.jsonl").write_text("".join(lines))
pathlib.Path("labels").write_text(",".join(sorted(labels)))
pathlib.Path("members").write_text("\n".join(sorted(parts)))
PYTHON
members=$(cat members)
smallest=$(wc -l < "$(wc -l ./*.jsonl | sort -n | awk 'NR == 1 {print $2}')")
text=(--text prompt --label type)

number=0 started=$(date +%s)
step() {
    number=$((number + 1))
    local began
    began=$(date +%s)
    echo "== $number: $*"
    "$@"
    echo "-- $(($(date +%s) - began)) seconds"
}
join() { for name in $members; do coordinator member invite "$name" | edge_client enrol --home "$name"; done; }
run() {
    for name in $members; do
        edge_client run --home "$name" --data "$name.jsonl" "${text[@]}" --until-finished > "$name.log" 2>&1 &
        pids+=($!)
    done
    wait "${pids[@]}"
}
serve() {
    coordinator serve > serve.log 2>&1 &
    server=$!
    trap 'kill "$server"' EXIT
    until grep -q serving serve.log; do kill -0 "$server"; done
}
pids=()

step coordinator init federation
step coordinator backbone add minilm ${MINILM:+--file "$MINILM"}
step coordinator job new medquad --labels "$(cat labels)" --members "$(wc -w <<< "$members")" --examples "$smallest" \
    --epsilon 8 --texts short --model minilm
step coordinator job try medquad.toml --data "$data/train.jsonl.gz" --rows public "${text[@]}" --column source \
    --epsilon 8 --minutes 4
step serve
step join
step coordinator job bundle medquad.tuned.toml --out bundle
step coordinator job create --bundle bundle
step run
step coordinator export medquad --out model
times > times
busy=$(awk 'NR == 2 {split($1 " " $2, t, /[ms ]+/); print int(t[1] * 60 + t[2] + t[3] * 60 + t[4])}' times)
echo "== $busy processor seconds, without the coordinator's"
echo "== $number commands, $(($(date +%s) - started)) seconds from the first to the exported model"
coordinator evaluate medquad --data "$data/test.jsonl.gz" "${text[@]}"
edge_client predict --bundle model "Is it passed on from a parent to a child?"
