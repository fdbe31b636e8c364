#!/usr/bin/env bash
# Chooses passwords for the users of ../users.acl, and makes the files that the kustomizations need:
#   secrets.sh [HOST:PORT]
# HOST:PORT is the server, by default the one of the component valkey. Nothing that exists is replaced.
set -euo pipefail
cd "$(dirname "$0")"
server=${1:-valkey:6379}
for folder in base/secrets valkey/secrets; do
  if [[ -e $folder ]]; then
    echo "$PWD/$folder exists: its passwords are in use; remove it to choose new ones" >&2
    exit 1
  fi
done
umask 077
mkdir -p base/secrets valkey/secrets
acl=$(< ../users.acl)
while read -r user; do
  password=$(head -c 32 /dev/urandom | sha256sum | cut -c1-48)
  hash=$(printf %s "$password" | sha256sum | cut -c1-64)
  acl=${acl/"#CHANGE-ME-$user "/"#$hash "}
  echo "$user $password" >> valkey/secrets/passwords
  case $user in
    scheduler | worker | ingest | web)
      echo "EMBEDFARM_REDIS_URL=redis://$user:$password@$server/0" > "base/secrets/$user.env"
      ;;
    # For the probes: valkey-cli reads the first, and redis-cli the second.
    operator) printf '%s\n' "VALKEYCLI_AUTH=$password" "REDISCLI_AUTH=$password" > valkey/secrets/operator.env ;;
  esac
done < <(grep -o 'CHANGE-ME-[a-z]*' ../users.acl | cut -d- -f3)
printf '%s\n' "$acl" > valkey/secrets/users.acl
# Keys for HTTP: yours, and one with which Prometheus may read.
for key in admin:admin prometheus:read; do
  made=$(embedfarm keys new "${key%:*}" --scopes "${key#*:}")
  sed -n 's/^line: //p' <<< "$made" >> base/secrets/keys
  echo "${key%:*} $(sed -n 's/^key:  //p' <<< "$made")" >> base/secrets/http
done
echo "made base/secrets and valkey/secrets; the keys for HTTP are in $PWD/base/secrets/http"
