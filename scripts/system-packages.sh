#!/usr/bin/env bash
# Debian packages of the programs that the tests run: Prometheus, Alertmanager, Redis, Chromium, ip and faketime. As root
# they are installed. Otherwise the tests that need a missing program are left out, and this script prints which.
set -uo pipefail
declare -A package=([prometheus]=prometheus [promtool]=prometheus [prometheus-alertmanager]=prometheus-alertmanager
    [redis-server]=redis-server [chromium]=chromium
    [ip]=iproute2 [faketime]=faketime)
declare -A tests=([prometheus]="metrics against a real Prometheus" [promtool]="promtool checks of metrics and rules"
    [prometheus-alertmanager]="alerts to their receivers"
    [redis-server]="the Redis store" [chromium]="the console in a real browser"
    [ip]="networks that are cut" [faketime]="clocks that jump")

missing=()
for program in "${!package[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} = 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    names=$(for program in "${missing[@]}"; do echo "${package[$program]}"; done | sort -u)
    echo "installing from Debian:" $names
    # Debian would start the servers it installs; the tests start their own on free ports.
    apt-get update -qq
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $names fonts-liberation >/dev/null ||
        echo "apt-get failed; continuing without these packages"
fi
for program in "${missing[@]}"; do
    command -v "$program" >/dev/null || echo "LEFT OUT: ${tests[$program]} (no $program; apt-get install ${package[$program]})"
done
exit 0
