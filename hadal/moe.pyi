from hadal.plugins.moe import *
