from hadal.plugins.monitor import *
