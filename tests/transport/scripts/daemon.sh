# A foreign program that leaves processes everywhere: $1 is where it writes their pids, $2 how it ends.
trap 'echo program told to stop' TERM
setsid sh -c 'trap "" TERM HUP; echo $$ >>"$0"; (setsid sh -c "trap \"\" TERM; echo \$\$ >>\"$0\"; while :; do sleep 0.05; done" &) ; while :; do sleep 0.05; done' "$1" &
sh -c 'echo $$ >>"$0"; while :; do sleep 0.05; done' "$1" &
echo $$ >>"$1"
while [ "$(wc -l <"$1")" -lt 4 ]; do sleep 0.01; done
echo all started
case "$2" in
exit) exit 5 ;;
signal) kill -SEGV $$ ;;
deaf) while :; do sleep 0.05; done ;;
*) sleep 600 & wait; exit 6 ;;
esac
