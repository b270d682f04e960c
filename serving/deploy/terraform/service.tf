# Servers on Fargate, without GPUs: for those see ../kubernetes. Beside each runs a Prometheus agent
# that sends its metrics to the workspace of monitoring.tf.

locals {
  ports         = { http = 8000, grpc = 50051 }
  drain_seconds = 100 # Fargate kills after 120
  registry      = "${data.aws_caller_identity.current.account_id}.dkr.ecr.${var.region}.amazonaws.com"
  log_options = {
    awslogs-group         = aws_cloudwatch_log_group.this.name
    awslogs-region        = var.region
    awslogs-stream-prefix = "ecs"
  }
  agent_config = yamlencode({
    global = { scrape_interval = "15s" }
    scrape_configs = [{
      job_name       = "jspec"
      static_configs = [{ targets = ["127.0.0.1:${local.ports.http}"] }]
      relabel_configs = [{ # else the series of all servers collide
        target_label = "instance"
        replacement  = "SERVER" # the host's name when the agent starts
      }]
    }]
    remote_write = [{
      url   = "${aws_prometheus_workspace.this.prometheus_endpoint}api/v1/remote_write"
      sigv4 = { region = var.region }
    }]
  })
}

resource "aws_cloudwatch_log_group" "this" {
  name              = "/ecs/${var.name}"
  retention_in_days = var.log_retention_days
}

resource "aws_ecs_cluster" "this" {
  name = var.name
  setting {
    name  = "containerInsights"
    value = "enabled"
  }
}

resource "aws_ecs_task_definition" "this" {
  family                   = var.name
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = var.cpu
  memory                   = var.memory
  execution_role_arn       = aws_iam_role.execution.arn
  task_role_arn            = aws_iam_role.task.arn
  runtime_platform {
    operating_system_family = "LINUX"
    cpu_architecture        = "X86_64"
  }
  ephemeral_storage {
    size_in_gib = 50
  }
  volume {
    name = "cache"
  }
  volume {
    name = "tmp"
  }
  volume {
    name = "agent"
  }

  container_definitions = jsonencode([
    {
      name      = "jspec"
      image     = "${local.registry}/${var.image_repository}:${var.image_tag}"
      essential = true
      user      = "10001:10001"
      command = [
        "--model=${var.model}",
        "--speculative-config=${var.speculative_config}",
        "--max-model-len=${var.max_model_len}",
        "--max-num-seqs=${var.max_num_seqs}",
        "--drain-timeout=${local.drain_seconds}",
        "--enable-prefix-caching",
      ]
      secrets                = [{ name = "JSPEC_API_KEY", valueFrom = var.api_keys_secret_arn }]
      portMappings           = [for port in values(local.ports) : { containerPort = port, protocol = "tcp" }]
      readonlyRootFilesystem = true
      linuxParameters        = { capabilities = { drop = ["ALL"] }, initProcessEnabled = true }
      mountPoints = [
        { sourceVolume = "cache", containerPath = "/cache", readOnly = false },
        { sourceVolume = "tmp", containerPath = "/tmp", readOnly = false },
      ]
      stopTimeout = 120
      healthCheck = {
        command = ["CMD", "python", "-c",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:${local.ports.http}/health', timeout=4)"]
        interval    = 15
        timeout     = 5
        retries     = 10
        startPeriod = 300 # the longest there is: a cold start must compile in it and the retries
      }
      logConfiguration = { logDriver = "awslogs", options = local.log_options }
    },
    {
      name      = "prometheus-agent"
      image     = "quay.io/prometheus/prometheus:v3.5.0"
      essential = false
      user      = "65534:65534"
      entryPoint = ["/bin/sh", "-c", join(" && ", [
        "printf '%s' \"$AGENT_CONFIG\" | sed \"s/SERVER/$HOSTNAME/\" > /prometheus/agent.yml",
        "exec /bin/prometheus --agent --config.file=/prometheus/agent.yml --storage.agent.path=/prometheus/wal",
      ])]
      environment            = [{ name = "AGENT_CONFIG", value = local.agent_config }]
      readonlyRootFilesystem = true
      mountPoints            = [{ sourceVolume = "agent", containerPath = "/prometheus", readOnly = false }]
      logConfiguration       = { logDriver = "awslogs", options = local.log_options }
    },
  ])
}

resource "aws_ecs_service" "this" {
  name                              = var.name
  cluster                           = aws_ecs_cluster.this.id
  task_definition                   = aws_ecs_task_definition.this.arn
  launch_type                       = "FARGATE"
  desired_count                     = var.min_servers
  health_check_grace_period_seconds = 900
  network_configuration {
    subnets          = var.private_subnet_ids
    security_groups  = [aws_security_group.server.id]
    assign_public_ip = false
  }
  load_balancer {
    target_group_arn = aws_lb_target_group.http.arn
    container_name   = "jspec"
    container_port   = local.ports.http
  }
  load_balancer {
    target_group_arn = aws_lb_target_group.grpc.arn
    container_name   = "jspec"
    container_port   = local.ports.grpc
  }
  deployment_circuit_breaker {
    enable   = true
    rollback = true
  }
  lifecycle {
    ignore_changes = [desired_count] # the autoscaler's
  }
  depends_on = [aws_lb_listener.tls, aws_lb_listener_rule.grpc]
}

resource "aws_appautoscaling_target" "this" {
  service_namespace  = "ecs"
  scalable_dimension = "ecs:service:DesiredCount"
  resource_id        = "service/${aws_ecs_cluster.this.name}/${aws_ecs_service.this.name}"
  min_capacity       = var.min_servers
  max_capacity       = var.max_servers
}

resource "aws_appautoscaling_policy" "cpu" {
  name               = "${var.name}-cpu"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension
  resource_id        = aws_appautoscaling_target.this.resource_id
  target_tracking_scaling_policy_configuration {
    predefined_metric_specification {
      predefined_metric_type = "ECSServiceAverageCPUUtilization"
    }
    target_value       = 70
    scale_out_cooldown = 60
    scale_in_cooldown  = 900
  }
}
