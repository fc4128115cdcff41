#pragma once

// Every differentiable op, by family.

#include "autograd/ops/activation.h"
#include "autograd/ops/attention.h"
#include "autograd/ops/batch_norm.h"
#include "autograd/ops/convolution.h"
#include "autograd/ops/copy.h"
#include "autograd/ops/cross_entropy.h"
#include "autograd/ops/dropout.h"
#include "autograd/ops/elementwise.h"
#include "autograd/ops/embedding.h"
#include "autograd/ops/index.h"
#include "autograd/ops/join.h"
#include "autograd/ops/matmul.h"
#include "autograd/ops/mse_loss.h"
#include "autograd/ops/norm.h"
#include "autograd/ops/pooling.h"
#include "autograd/ops/reduce.h"
#include "autograd/ops/rotary.h"
#include "autograd/ops/softmax.h"
#include "autograd/ops/sort.h"
#include "autograd/ops/view.h"
