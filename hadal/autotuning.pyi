from hadal.plugins.autotuning import *
