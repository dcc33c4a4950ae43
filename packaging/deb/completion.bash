# bash completion for tt-device-plugin(8)

_tt_device_plugin() {
    local cur prev words cword split
    _init_completion -s || return

    # ---- options, made by: make generate
    local commands='run list check fix'
    local -A flags=(
        [run]='--help
            --config-file
            --device-plugin-dir
            --root
            --resource-domain
            --resource-naming
            --visible-devices
            --unit
            --device-list-strategy
            --cdi-dir
            --labels-dir
            --metrics-file
            --pod-resources-socket
            --fail-on-init-error
            --log-level
            --hugepages'
        [list]='--help
            --json
            --config-file
            --device-plugin-dir
            --root
            --resource-domain
            --resource-naming
            --unit
            --pod-resources-socket'
        [check]='--help
            --quiet
            --config-only
            --config-file
            --device-plugin-dir
            --root
            --resource-domain
            --resource-naming
            --visible-devices
            --unit
            --device-list-strategy
            --cdi-dir
            --labels-dir
            --metrics-file
            --pod-resources-socket
            --fail-on-init-error
            --log-level
            --hugepages'
        [fix]='--help
            --yes
            --config-file'
    )
    local -A values=(
        [--config-file]='FILE'
        [--device-plugin-dir]='DIRECTORY'
        [--root]='DIRECTORY'
        [--resource-domain]='TEXT'
        [--resource-naming]='board card arch'
        [--visible-devices]='bdf index none'
        [--unit]='chip board'
        [--device-list-strategy]='device-specs cdi'
        [--cdi-dir]='DIRECTORY'
        [--labels-dir]='DIRECTORY'
        [--metrics-file]='FILE'
        [--pod-resources-socket]='FILE'
        [--fail-on-init-error]='SWITCH'
        [--log-level]='debug info warning error'
        [--hugepages]='private host none'
    )
    # ---- end of the options

    local wanted=''
    if [[ $cword == 1 ]]; then
        wanted=$commands
        [[ $cur != -* ]] || wanted='--help --version'
    elif [[ $cur == -* ]]; then
        wanted=${flags[${words[1]:-run}]}
    elif [[ $prev == --* ]]; then
        case ${values[$prev]} in
        FILE)
            _filedir
            return
            ;;
        DIRECTORY)
            _filedir -d
            return
            ;;
        '' | TEXT) ;;
        SWITCH) [[ $split != true ]] || wanted='true false' ;; # after "=" only
        *) wanted=${values[$prev]} ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$wanted" -- "$cur"))
} &&
    complete -F _tt_device_plugin tt-device-plugin
