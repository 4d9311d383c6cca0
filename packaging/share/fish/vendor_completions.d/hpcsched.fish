# Read by fish at the first TAB after `hpcsched`: the installed version says how to complete.
hpcsched completion fish | source
