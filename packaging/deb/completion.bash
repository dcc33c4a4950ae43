# bash completion for tt-device-plugin(8)

_tt_device_plugin() {
    local cur prev words cword split
    _init_completion -s -n : || return # addresses have colons

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
            --hugepages
            --fail-on-init-error
            --log-level'
        [list]='--help
            --json'
        [check]='--help
            --quiet
            --config-only
            --config-file'
        [fix]='--help
            --yes'
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
        [--hugepages]='private host none'
        [--fail-on-init-error]='SWITCH'
        [--log-level]='debug info warning error'
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
    elif [[ ${words[1]} == fix ]]; then
        # Tenstorrent's functions on the PCI bus; one that is gone must be typed.
        wanted=$(grep -ls 0x1e52 /sys/bus/pci/devices/*/vendor | cut -d / -f 6)
    fi
    COMPREPLY=($(compgen -W "$wanted" -- "$cur"))
    __ltrim_colon_completions "$cur"
} &&
    complete -F _tt_device_plugin tt-device-plugin
