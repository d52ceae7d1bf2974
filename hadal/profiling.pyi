from hadal.plugins.profiling import *
